/* What the C files share: how things are spelled for the compiler, bfloat16, and work in threads. */

#ifndef SECATEUR_THREADS_H
#define SECATEUR_THREADS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#else
#error "gcc or clang: the kernels use vector_size and inlining that is insisted on"
#endif

enum { MOST_THREADS = 64 };

/* Calls `work` with each of `count` parts of `size` bytes, at most MOST_THREADS, in as many threads. kernels.c has it. */
void secateur_in_threads(void *(*work)(void *), void *parts, size_t size, size_t count);

/* One of many values: float, or bfloat16 as its 16 bits. */
INLINE float value_at(const void *values, size_t at, int is_bfloat16) {
    if (!is_bfloat16) return ((const float *)values)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)values)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
