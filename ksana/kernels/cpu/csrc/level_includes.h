// What level.inl needs, included before a file says which instructions may be used: what comes from the standard
// library must run everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "abi.h"
#include "kernels.h"
#include "scratch.h"
#include "stopwatch.h"
#include "thread_pool.h"

#ifdef KSANA_X86_LEVELS
#include <immintrin.h>
#endif
