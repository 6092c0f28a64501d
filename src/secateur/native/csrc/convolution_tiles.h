/* The innermost loops of convolution.c for vectors of WIDE numbers; included once for each width that is compiled.

Needs WIDE, NAMED(name), which makes names of this width, and TILES(EACH), which calls EACH for each number of vectors
that a tile may have: as many as there are registers for, but for the one that holds a weight and one to spare. */

typedef float NAMED(Floats) __attribute__((vector_size(4 * WIDE)));
typedef int32_t NAMED(Signed) __attribute__((vector_size(4 * WIDE)));
/* the same, anywhere in memory */
typedef float NAMED(Loose) __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

/* Sums of `tile` vectors of places for some outputs, over one block of channels. Each kept weight is one load of its
place in the table, one of the place's offset, one of its value, and then `tile` multiplications whose inputs come from
memory: the sums stay in registers. A removed weight is not multiplied. */
INLINE void NAMED(outputs)(const Block *b, const int tile, const int is_bfloat16) {
    const uint16_t *restrict indices = b->indices;
    const int32_t *restrict table = b->table;
    for (size_t o = b->first_row; o < b->end_row; o++) {
        NAMED(Floats) a[MOST_TILE];
        float *partial = b->partial + (o - b->first_row) * (size_t)tile * WIDE;
        if (b->is_first) {
            const float bias = b->bias ? b->bias[o] : 0;
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = (NAMED(Floats)){0} + bias;
        } else {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] = *(const NAMED(Loose) *)(partial + t * WIDE);
        }
        for (size_t at = b->pointers[o], end = b->pointers[o + 1]; at < end; at++) {
            const float *x = b->x + table[indices[at]];
            const float value = value_at(b->values, at, is_bfloat16);
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] += value * *(const NAMED(Loose) *)(x + t * WIDE);
        }
        if (!b->is_last) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(partial + t * WIDE) = a[t];
            continue;
        }
        const size_t place = o * b->places + b->start;
        if (b->count < (size_t)tile * WIDE || b->skip) { /* not all of the tile is there, or others write some of it */
            float all[MOST_TILE * WIDE];
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(all + t * WIDE) = a[t];
            for (size_t q = b->skip; q < b->count; q++) {
                float y = b->addend ? all[q] + b->addend[place + q] : all[q];
                b->y[place + q] = b->rectified && y < 0 ? 0 : y;
            }
            continue;
        }
        if (b->addend) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] += *(const NAMED(Loose) *)(b->addend + place + t * WIDE);
        }
        if (b->rectified) { /* what is no number stays so */
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] = (NAMED(Floats))((NAMED(Signed))a[t] & ~(NAMED(Signed))(a[t] < 0));
        }
        _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(b->y + place + t * WIDE) = a[t];
    }
}

#define ONE_TILE(T)                                                                                                    \
    static void NAMED(float_##T)(const Block *b) { NAMED(outputs)(b, T, 0); }                                          \
    static void NAMED(bfloat16_##T)(const Block *b) { NAMED(outputs)(b, T, 1); }
TILES(ONE_TILE)
#undef ONE_TILE

#define BOTH(T) {NAMED(float_##T), NAMED(bfloat16_##T)},
static void (*const NAMED(OUTPUTS)[MOST_TILE][2])(const Block *) = {TILES(BOTH)};
#undef BOTH
