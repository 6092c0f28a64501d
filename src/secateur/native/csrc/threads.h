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

/* glibc 2.34 gave these a new version, and still has the one that every glibc has: a wheel for all asks for that. */
#if defined(SECATEUR_ANY_GLIBC) && defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5\n.symver pthread_join, pthread_join@GLIBC_2.2.5");
#elif defined(SECATEUR_ANY_GLIBC) && defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17\n.symver pthread_join, pthread_join@GLIBC_2.17");
#endif

enum { MOST_THREADS = 64 };

/* Calls `work` with each of `count` parts of `size` bytes, at most MOST_THREADS, in as many threads. kernels.c has it. */
void secateur_in_threads(void *(*work)(void *), void *parts, size_t size, size_t count);

/* How values are stored: float, bfloat16 as its 16 bits, or int8, which a scale for each output then multiplies. */
enum { FLOAT, BFLOAT16, INT8 };
static const size_t SIZES[] = {4, 2, 1};

/* One of many values. */
INLINE float value_at(const void *values, size_t at, int kind) {
    if (kind == FLOAT) return ((const float *)values)[at];
    if (kind == INT8) return (float)((const int8_t *)values)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)values)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
