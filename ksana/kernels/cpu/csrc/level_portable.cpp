// The kernels for any processor.
#include "level_includes.h"

#define KSANA_LEVEL_NAME "portable"

namespace ksana {
namespace portable {
#include "level.inl"
}
const Kernels portable_kernels = portable::level_kernels;
}  // namespace ksana
