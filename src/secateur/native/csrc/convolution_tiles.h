/* The innermost loops of convolution.c for vectors of WIDE numbers; included once for each width that is compiled.

Needs WIDE, EVENS, the even numbers of one vector and the odd ones of another, NAMED(name), which makes names of this
width, and TILES(EACH), which calls EACH for each number of vectors
that a tile may have: as many as there are registers for, but for the one that holds a weight and one to spare. */

typedef float NAMED(Floats) __attribute__((vector_size(4 * WIDE)));
typedef int32_t NAMED(Signed) __attribute__((vector_size(4 * WIDE)));
/* the same, anywhere in memory */
typedef int32_t NAMED(LooseSigned) __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef float NAMED(Loose) __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

/* What is negative becomes zero; what is no number stays so. */
INLINE NAMED(Floats) NAMED(positive)(NAMED(Floats) a) {
    return (NAMED(Floats))((NAMED(Signed))a & ~(NAMED(Signed))(a < 0));
}

INLINE NAMED(Floats) NAMED(at_most_6)(NAMED(Floats) a) {
    const NAMED(Floats) six = (NAMED(Floats)){0} + 6;
    const NAMED(Signed) is_more = a > six;
    return (NAMED(Floats))(((NAMED(Signed))six & is_more) | ((NAMED(Signed))a & ~is_more));
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

/* `count` numbers, in vectors, the last of them whole: those at `places` from `from` on, where the mask, if there is one,
has its bits set; else zeros. */
static void NAMED(vectors_copied)(const float *from, const int32_t *places, const float *mask, size_t count, float *restrict out) {
    if (mask)
        for (size_t n = 0; n < count; n += WIDE) {
            const NAMED(Signed) bits = *(const NAMED(LooseSigned) *)(mask + n);
            *(NAMED(Loose) *)(out + n) = (NAMED(Floats))(*(const NAMED(LooseSigned) *)(from + *places++) & bits);
        }
    else
        for (size_t n = 0; n < count; n += WIDE) *(NAMED(Loose) *)(out + n) = *(const NAMED(Loose) *)(from + *places++);
}

/* Numbers of a vector: the first `count` of them. */
INLINE void NAMED(some_stored)(float *to, NAMED(Floats) a, size_t count) {
    float all[WIDE];
    *(NAMED(Loose) *)all = a;
    if (WIDE == 16 && count >= 8) { /* twice half of them, wherever they meet */
        memcpy(to, all, 32);
        memcpy(to + count - 8, all + count - 8, 32);
    } else if (WIDE >= 8 && count >= 4) {
        memcpy(to, all, 16);
        memcpy(to + count - 4, all + count - 4, 16);
    } else
        for (size_t l = 0; l < count; l++) to[l] = all[l];
}

INLINE NAMED(Floats) NAMED(some_of)(const float *from, size_t count) {
    float all[WIDE] = {0};
    for (size_t l = 0; l < count; l++) all[l] = from[l];
    return *(const NAMED(Loose) *)all;
}

/* Asks for the lines of the cache in which `tile` vectors of an output will be, and those of what is added to them. */
INLINE void NAMED(fetched)(const Block *b, size_t o, const int tile) {
    if (b->addend)
        for (int t = 0; t < tile * WIDE; t += LINE) __builtin_prefetch(b->addend + o * b->addend_plane + b->start + t);
    for (int t = 0; t < tile * WIDE; t += LINE) __builtin_prefetch(b->y + o * b->y_plane + b->start + t, 1);
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
            NAMED(fetched)(b, o + 1, tile);
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
        float *y = b->y + o * b->y_plane + b->start;
        const float *addend = b->addend ? b->addend + o * b->addend_plane + b->start : NULL;
        if (b->skip) { /* others write some of it */
            float all[MOST_TILE * WIDE];
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(all + t * WIDE) = a[t];
            for (size_t q = b->skip; q < b->count; q++) {
                const float sum = addend ? all[q] + addend[q] : all[q];
                y[q] = b->activation == RELU && sum < 0 ? 0 : sum;
            }
            if (b->activation > RELU) activated(b->activation, y + b->skip, b->count - b->skip);
            continue;
        }
        /* what is whole: all vectors, or those but the last, of which some is there. Where rows are longer than those of
        the output, numbers after the end of one are written, too, and the next over them; what is added may lie where the
        output does, so it is read before */
        const int whole = b->to ? (int)b->vectors - 1 : (int)(b->count / WIDE);
        const size_t left = b->to ? b->last : b->count % WIDE;
        if (b->to) {
            y -= b->start;
            if (addend) addend -= b->start;
        }
        if (addend && whole == tile) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] += *(const NAMED(Loose) *)(addend + t * WIDE);
        } else if (addend) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) {
                const float *from = addend + (b->to ? b->to[t] : (size_t)t * WIDE);
                if (t < whole) a[t] += *(const NAMED(Loose) *)from;
                else if (t == whole) a[t] += NAMED(some_of)(from, left);
            }
        }
        if (b->activation == RELU || b->activation == RELU6) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = NAMED(positive)(a[t]);
        }
        if (b->activation == RELU6) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) a[t] = NAMED(at_most_6)(a[t]);
        }
        if (whole == tile) {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(y + t * WIDE) = a[t];
        } else {
            _Pragma("GCC unroll 32") for (int t = 0; t < tile; t++) {
                float *to = y + (b->to ? b->to[t] : (size_t)t * WIDE);
                if (t < whole) *(NAMED(Loose) *)to = a[t];
                else if (t == whole) NAMED(some_stored)(to, a[t], left);
            }
        }
        if (b->activation > RELU6 && b->to) activated(b->activation, y + b->to[0], b->to[whole] + left - b->to[0]);
        else if (b->activation > RELU6) activated(b->activation, y, b->count);
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
