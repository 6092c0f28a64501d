/* What becomes of a convolution's outputs after their sums, beyond a ReLU: those that networks for phones and detectors
have. It is done where they have just been written, in the first cache.

Law: within a few units in the last place of what torch computes; what is no number stays so. */

#ifndef SECATEUR_ACTIVATIONS_H
#define SECATEUR_ACTIVATIONS_H

#include "threads.h"

enum { NOTHING, RELU, RELU6, HARDSWISH, SILU }; /* as convolutions.py counts them */

/* e to the power of x, of which only what is between -88 and 88 matters here: two to a whole power, by the bits of a
float, times a polynomial for what is left of it. */
INLINE float exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float whole = bounded * 1.44269504088896341f + 12582912.0f; /* 1.5 · 2²³: the last bits are the rounded number */
    const float power = whole - 12582912.0f;
    const float left = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * left + 1.3981999507e-3f;
    sum = sum * left + 8.3334519073e-3f;
    sum = sum * left + 4.1665795894e-2f;
    sum = sum * left + 1.6666665459e-1f;
    sum = sum * left + 5.0000001201e-1f;
    sum = sum * left * left + left + 1.0f;
    uint32_t bits;
    memcpy(&bits, &whole, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return sum * scale;
}

INLINE float clipped(float x) {
    const float low = x < 0 ? 0 : x;
    return low > 6 ? 6 : low;
}

/* `count` outputs, in place; a ReLU is left to the store, and so is a ReLU6 where that has whole tiles. */
static inline void activated(int kind, float *restrict y, size_t count) {
    if (kind == RELU6)
        for (size_t n = 0; n < count; n++) y[n] = clipped(y[n]);
    if (kind == HARDSWISH)
        for (size_t n = 0; n < count; n++) y[n] = y[n] * clipped(y[n] + 3) * (1.0f / 6);
    if (kind == SILU)
        for (size_t n = 0; n < count; n++) y[n] = y[n] / (1 + exponential(-y[n]));
}

#endif
