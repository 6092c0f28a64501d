/* The innermost loops of convolution.c for vectors of WIDE numbers; included once for each width that is compiled.

Needs WIDE, EVENS, the even numbers of one vector and the odd ones of another, NAMED(name), which makes names of this
width, and TILES(EACH), which calls EACH for each number of vectors
that a tile may have: as many as there are registers for, but for the one that holds a weight and one to spare. */

typedef float NAMED(Floats) __attribute__((vector_size(4 * WIDE)));
typedef int32_t NAMED(Signed) __attribute__((vector_size(4 * WIDE)));
/* the same, anywhere in memory */
typedef float NAMED(Loose) __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

/* What is negative becomes zero; what is no number stays so. */
INLINE NAMED(Floats) NAMED(positive)(NAMED(Floats) a) {
    return (NAMED(Floats))((NAMED(Signed))a & ~(NAMED(Signed))(a < 0));
}

/* `count` numbers, a vector at least: every second from `from` on; nothing after the last of them is read. */
INLINE void NAMED(every_second_wide)(const float *restrict from, ptrdiff_t count, float *restrict to) {
    for (ptrdiff_t j = 0; j < count; j += WIDE) {
        if (j + WIDE > count) j = count - WIDE; /* once more from where a whole vector is left */
        const NAMED(Floats) a = *(const NAMED(Loose) *)(from + 2 * j), b = *(const NAMED(Loose) *)(from + 2 * j + WIDE - 1);
#if defined(__clang__)
        *(NAMED(Loose) *)(to + j) = __builtin_shufflevector(a, b, EVENS);
#else
        *(NAMED(Loose) *)(to + j) = __builtin_shuffle(a, b, (NAMED(Signed)){EVENS});
#endif
    }
}

/* The vectors of a tile to where the output has them. Numbers after the end of a row are written, too, and the next
row's over them; of the last vector only what is there. What is added may lie where the output does, so it is read
before anything is written. */
static void NAMED(rows_stored)(const Block *b, size_t output, float *all) {
    float *y = b->y + output;
    const size_t last = b->vectors - 1;
    if (b->addend) {
        const float *addend = b->addend + output;
        for (size_t t = 0; t < last; t++) *(NAMED(Loose) *)(all + t * WIDE) += *(const NAMED(Loose) *)(addend + b->to[t]);
        for (size_t l = 0; l < b->last; l++) all[last * WIDE + l] += addend[b->to[last] + l];
    }
    for (size_t t = 0; t < last; t++) {
        NAMED(Floats) a = *(const NAMED(Loose) *)(all + t * WIDE);
        *(NAMED(Loose) *)(y + b->to[t]) = b->rectified ? NAMED(positive)(a) : a;
    }
    for (size_t l = 0; l < b->last; l++) {
        float a = all[last * WIDE + l];
        y[b->to[last] + l] = b->rectified && a < 0 ? 0 : a;
    }
}

/* Asks for the lines of the cache in which `tile` vectors of an output will be, and those of what is added to them. */
INLINE void NAMED(fetched)(const Block *b, size_t place, const int tile) {
    if (b->addend)
        for (int t = 0; t < tile * WIDE; t += LINE) __builtin_prefetch(b->addend + place + t);
    for (int t = 0; t < tile * WIDE; t += LINE) __builtin_prefetch(b->y + place + t, 1);
}

/* Sums of `tile` vectors of places for some outputs, over one block of channels. Each kept weight is one load of its
place in the table, one of the place's offset, one of its value, and then `tile` multiplications whose inputs come from
memory: the sums stay in registers. A removed weight is not multiplied. */
INLINE void NAMED(outputs)(const Block *b, const int tile, const int kind) {
    const uint16_t *restrict indices = b->indices;
    const int32_t *restrict table = b->table;
    for (size_t o = b->first_row; o < b->end_row; o++) {
        NAMED(Floats) a[MOST_TILE];
        float *partial = b->partial + (o - b->first_row) * (size_t)tile * WIDE;
        if (b->is_first) {
            const float bias = b->bias && kind != INT8 ? b->bias[o] : 0;
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = (NAMED(Floats)){0} + bias;
        } else {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] = *(const NAMED(Loose) *)(partial + t * WIDE);
        }
        if (b->is_last && o + 1 < b->end_row) /* the next output lies a plane further, where no processor looks ahead */
            NAMED(fetched)(b, (o + 1) * b->places + b->start, tile);
        for (size_t at = b->pointers[o], end = b->pointers[o + 1]; at < end; at++) {
            const float *x = b->x + table[indices[at]];
            const float value = value_at(b->values, at, kind);
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++)
                a[t] += value * *(const NAMED(Loose) *)(x + t * WIDE);
        }
        if (!b->is_last) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(partial + t * WIDE) = a[t];
            continue;
        }
        if (kind == INT8) {
            const float scale = b->scales[o], bias = b->bias ? b->bias[o] : 0;
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = a[t] * scale + bias;
        }
        const size_t place = o * b->places + b->start;
        if (b->to) { /* rows are longer than those of the output */
            float all[MOST_TILE * WIDE];
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(all + t * WIDE) = a[t];
            NAMED(rows_stored)(b, o * b->places, all);
            continue;
        }
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
        if (b->rectified) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = NAMED(positive)(a[t]);
        }
        _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(b->y + place + t * WIDE) = a[t];
    }
}

#define ONE_TILE(T)                                                                                                    \
    static void NAMED(float_##T)(const Block *b) { NAMED(outputs)(b, T, FLOAT); }                                      \
    static void NAMED(bfloat16_##T)(const Block *b) { NAMED(outputs)(b, T, BFLOAT16); }                                \
    static void NAMED(int8_##T)(const Block *b) { NAMED(outputs)(b, T, INT8); }
TILES(ONE_TILE)
#undef ONE_TILE

#define OF_KINDS(T) {NAMED(float_##T), NAMED(bfloat16_##T), NAMED(int8_##T)},
static void (*const NAMED(OUTPUTS)[MOST_TILE][3])(const Block *) = {TILES(OF_KINDS)};
#undef OF_KINDS
