// What is fetched from memory while something else computes.

constexpr int64_t kLine = 64;  // bytes of a cache line

// To the second cache: what a task has in hand fills the first.
inline __attribute__((always_inline)) void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Weights that a tile has fetched while it computes: from `from` on, so many bytes a step.
struct Ahead {
  const char* from;
  int64_t pace;
};

// Neighbours in memory.
struct Lines {
  const char* from;
  int64_t count;
};

// The first key that a query at `position` of its sequence sees.
inline int64_t oldest_key(const Step& step, int64_t position) {
  return step.window ? max64(0, position - step.window + 1) : 0;
}

// The keys and values that the attention of a step is going to read, request by request and block by block.
class CachedKeys {
 public:
  CachedKeys() = default;  // none
  CachedKeys(const Layer& layer, const Step& step, const void* cache)
      : step_(&step), cache_(static_cast<const char*>(cache)), last_request_(step.num_requests) {
    const int64_t element = step.cache_dtype == kFloat32 ? 4 : (step.cache_dtype == kBFloat16 ? 2 : 1);
    block_bytes_ = 2 * layer.num_kv_heads * step.block_size * layer.head_size * element;
    begin();
  }

  // Those of a thread's share of the requests.
  CachedKeys part(int64_t part, int64_t parts) const {
    CachedKeys some = *this;
    some.request_ = last_request_ * part / parts;
    some.last_request_ = last_request_ * (part + 1) / parts;
    some.begin();
    return some;
  }

  // The next lines, up to so many; none if there are no more.
  Lines next(int64_t most) {
    while (request_ < last_request_ && position_ >= step_->context_lens[request_]) {
      ++request_;
      begin();
    }
    if (request_ >= last_request_) return {nullptr, 0};
    const int64_t block = step_->block_tables[request_ * step_->block_table_stride + position_ / step_->block_size];
    const int64_t lines = cdiv(block_bytes_, kLine);
    const Lines found{cache_ + block * block_bytes_ + line_ * kLine, min64(most, lines - line_)};
    line_ += found.count;
    if (line_ == lines) {
      line_ = 0;
      position_ += step_->block_size;
    }
    return found;
  }

 private:
  // To the block with the first key that a request's next query sees.
  void begin() {
    if (request_ < last_request_)
      position_ = oldest_key(*step_, step_->context_lens[request_]) / step_->block_size * step_->block_size;
  }

  const Step* step_ = nullptr;
  const char* cache_ = nullptr;
  int64_t block_bytes_ = 0;
  int64_t request_ = 0, last_request_ = 0;
  int64_t position_ = 0, line_ = 0;  // of the request's tokens, and in the block
};
