// What the entry points are told, as ctypes structures in native.py mirror it. Raw pointers only: nothing here depends
// on torch.
#pragma once

#include <cstdint>

namespace ksana {

constexpr int kAbiVersion = 7;

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat8E4M3 = 2, kFloat8E5M2 = 3 };

enum WeightFormat : int32_t { kPlain = 0, kInt8 = 1, kInt4 = 2 };

// A projection, packed by ksana_cpu_pack or ksana_cpu_pack_codes.
struct Linear {
  const void* packed;
  const float* bias;  // in the order of the packed columns, as many as they; null if there is none
  int64_t out_features;
  int64_t in_features;
  int32_t format;
  int32_t group_size;   // of int8 and int4
  int32_t interleaved;  // the rows are two halves, and every panel holds 16 of the one beside 16 of the other
};

enum Activation : int32_t { kSilu = 0, kGelu = 1 };

struct Layer {
  const float* input_norm;
  const float* mlp_input_norm;
  const float* attention_output_norm;  // this and what follows: null if the model has none
  const float* mlp_output_norm;
  const float* q_norm;
  const float* k_norm;
  Linear qkv, output, gate_up, down;
  int64_t hidden_size, num_heads, num_kv_heads, head_size, intermediate_size;
  float eps, scale;
  float soft_cap;  // of attention scores; 0: none
  float kv_scale;  // what keys and values are divided by in a cache of eight bits (`scale` contains it); else 1
  int32_t activation;
};

// The batch of a step, for the layer's KV cache group. Arrays as in ksana.kernels.batch.AttentionBatch.
struct Step {
  const int64_t* query_starts;
  const int64_t* context_lens;
  const int64_t* block_tables;
  const int64_t* slot_mapping;
  const void* cos;  // [num_tokens, head_size]
  const void* sin;
  int64_t num_tokens, num_requests, block_table_stride, block_size;
  int64_t window;  // 0: none
  int32_t cache_dtype;
};

}  // namespace ksana
