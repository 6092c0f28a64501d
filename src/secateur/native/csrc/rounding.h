/* Numbers as codes of 8 bits: number = scale * (code - zero), such that 0 has a code and the extremes are there. */

#ifndef SECATEUR_ROUNDING_H
#define SECATEUR_ROUNDING_H

#include "threads.h"

/* How some numbers are rounded; of such as are not all finite the scale is NaN. */
typedef struct {
    float scale;
    int32_t zero;
} Rounded;

/* The least and the largest of some numbers and 0; and whether one is no number. */
typedef struct {
    float low, high;
    int odd;
} Extremes;

enum { AT_ONCE = 16 };
/* becomes whatever width the machine has, with its instructions for the smaller and the larger of two numbers */
#define EACH_OF_16 _Pragma("GCC unroll 1") for (int l = 0; l < AT_ONCE; l++)

static Extremes extremes(const float *restrict x, size_t count) {
    float low[AT_ONCE], high[AT_ONCE];
    int32_t odd[AT_ONCE];
    EACH_OF_16 low[l] = 0;
    EACH_OF_16 high[l] = 0;
    EACH_OF_16 odd[l] = 0;
    size_t at = 0;
    for (; at + AT_ONCE <= count; at += AT_ONCE) {
        const float *some = x + at;
        EACH_OF_16 low[l] = some[l] < low[l] ? some[l] : low[l];
        EACH_OF_16 high[l] = some[l] > high[l] ? some[l] : high[l];
        EACH_OF_16 odd[l] |= some[l] != some[l];
    }
    Extremes found = {0, 0, 0};
    for (int l = 0; l < AT_ONCE; l++) {
        found.low = low[l] < found.low ? low[l] : found.low;
        found.high = high[l] > found.high ? high[l] : found.high;
        found.odd |= odd[l];
    }
    for (; at < count; at++) {
        found.low = x[at] < found.low ? x[at] : found.low;
        found.high = x[at] > found.high ? x[at] : found.high;
        found.odd |= x[at] != x[at];
    }
    return found;
}

/* Adding and subtracting 3 * 2**22 rounds to even. */
static const float WHOLE = 12582912.0f;

static Rounded rounded_for(Extremes e) {
    const float scale = e.high / 255.0f - e.low / 255.0f;
    if (e.odd || !(scale <= 3.4028234e38f)) return (Rounded){__builtin_nanf(""), 0};
    if (!(scale > 1e-35f)) return (Rounded){0, 0}; /* its inverse would overflow */
    return (Rounded){scale, (int32_t)((-e.low * (1.0f / scale) + WHOLE) - WHOLE)};
}

/* The codes of numbers that are rounded so. */
static void to_codes(const float *restrict x, size_t count, Rounded r, uint8_t *restrict codes) {
    if (!(r.scale > 0)) {
        memset(codes, 0, count);
        return;
    }
    const float inverse = 1.0f / r.scale, zero = (float)r.zero;
    for (size_t at = 0; at < count; at++) {
        const int32_t code = (int32_t)(((x[at] * inverse + WHOLE) - WHOLE) + zero);
        codes[at] = (uint8_t)(code < 0 ? 0 : code > 255 ? 255 : code);
    }
}

#endif
