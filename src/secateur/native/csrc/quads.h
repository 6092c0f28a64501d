/* Blocks of 16 outputs in int8 times inputs that are rounded to 8 bits: four kept inputs at a time are a *quad*, whose 64
weights lie side by side, four of each output. Included by kernels.c once for each way to multiply.

Needs QUADS(name), which makes names of this way, ON, an attribute of functions or nothing, and PLUS(sums, inputs,
weights), which adds to 16 sums the products of four unsigned and four signed bytes each. */

/* The block's outputs for one vector of codes. */
ON static void QUADS(quads_one)(const Product *p, size_t block, const uint8_t *restrict x, const Rounded *r, float *y) {
    Words a = {0}, b = {0}, of_weights = {0};
    for (size_t at = p->pointers[block], end = p->pointers[block + 1]; at < end; at += 4) {
        const uint16_t *i = p->indices + at;
        const int8_t *values = (const int8_t *)p->values + at * LANE;
        const uint32_t four = (uint32_t)x[i[0]] | (uint32_t)x[i[1]] << 8 | (uint32_t)x[i[2]] << 16 | (uint32_t)x[i[3]] << 24;
        PREFETCH_FAR((uintptr_t)values + FAR);
        Words weights = words(values);
        if (at & 4) b = PLUS(b, (Words){0} + four, weights);
        else a = PLUS(a, (Words){0} + four, weights);
        of_weights = PLUS(of_weights, (Words){0} + 0x01010101u, weights);
    }
    a += b;
    const size_t top = block * LANE, count = p->rows - top < LANE ? p->rows - top : LANE;
    for (size_t l = 0; l < count; l++) y[top + l] = unrounded(p, top + l, a[l], of_weights[l], r);
}

/* The block's outputs for 16 vectors, whose codes are (columns, 16). Sums of some outputs stay in registers. */
ON static void QUADS(quads_strip)(const Product *p, size_t block, const uint8_t *restrict x, const Rounded *r, float *y,
                                  size_t count) {
    const size_t at = p->pointers[block], end = p->pointers[block + 1], top = block * LANE;
    for (size_t first = 0; first < LANE && top + first < p->rows; first += OUTPUTS_AT_ONCE) {
        Words a[OUTPUTS_AT_ONCE], of_weights = {0};
        _Pragma("GCC unroll 16") for (int o = 0; o < OUTPUTS_AT_ONCE; o++) a[o] = (Words){0};
        for (size_t quad = at; quad < end; quad += 4) {
            const uint16_t *i = p->indices + quad;
            const int8_t *values = (const int8_t *)p->values + quad * LANE;
            PREFETCH(quad + 2 * AHEAD < end ? x + (size_t)i[2 * AHEAD] * LANE : x);
            PREFETCH(quad + 2 * AHEAD < end ? x + (size_t)i[2 * AHEAD + 2] * LANE : x);
            Words inputs = widened(x + (size_t)i[0] * LANE) | widened(x + (size_t)i[1] * LANE) << 8 |
                           widened(x + (size_t)i[2] * LANE) << 16 | widened(x + (size_t)i[3] * LANE) << 24;
            _Pragma("GCC unroll 16") for (int o = 0; o < OUTPUTS_AT_ONCE; o++) {
                uint32_t four;
                memcpy(&four, values + (first + (size_t)o) * 4, sizeof four);
                a[o] = PLUS(a[o], inputs, (Words){0} + four);
            }
            of_weights = PLUS(of_weights, (Words){0} + 0x01010101u, words(values));
        }
        for (size_t o = 0; o < OUTPUTS_AT_ONCE && top + first + o < p->rows; o++)
            for (size_t b = 0; b < count; b++)
                y[b * p->rows + top + first + o] = unrounded(p, top + first + o, a[o][b], of_weights[first + o], r + b);
    }
}
