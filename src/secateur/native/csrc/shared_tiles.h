/* The innermost loops of convolution.c where 4 consecutive outputs share the places of their kept weights; included, as
convolution_tiles.h and after it, once for each width of vectors.

Law: as there; and each input that is loaded is multiplied by the weights of 4 outputs, so that sums of fewer places, a
*piece* of the tile, fill the registers. Where inputs are loaded once for 4 multiplications it hardly matters that they
are no multiples of a line of the cache, and no rows are made longer. Of 16 outputs that share places the 4 times 4 were
as fast as one block: the index is little of the work.

Needs what convolution_tiles.h needs, and PIECES(EACH), which calls EACH for each number of vectors of a piece. */

/* Sums of `tile` vectors of places for some fours of outputs, over one block of channels. */
INLINE void NAMED(fours)(const Block *b, const int tile, const int kind) {
    const uint16_t *restrict indices = b->indices;
    const int32_t *restrict table = b->table;
    for (size_t o = b->first_row; o < b->end_row; o++) {
        NAMED(Floats) a[4][MOST_PIECE];
        const size_t four = 4 * o; /* its first output */
        float *partial = b->partial + 4 * (o - b->first_row) * b->size;
        if (b->is_first) {
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) {
                const float bias = b->bias && kind != INT8 ? b->bias[four + (size_t)r] : 0;
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) a[r][t] = (NAMED(Floats)){0} + bias;
            }
        } else {
            _Pragma("GCC unroll 4") for (size_t r = 0; r < 4; r++)
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++)
                    a[r][t] = *(const NAMED(Loose) *)(partial + r * b->size + t * WIDE);
        }
        for (size_t at = b->pointers[o], end = b->pointers[o + 1]; at < end; at++) {
            const float *x = b->x + table[indices[at]];
            const NAMED(Floats) none = {0}; /* to take it away makes a vector, by one load, and changes nothing */
            NAMED(Floats) inputs[MOST_PIECE];
            _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) inputs[t] = *(const NAMED(Loose) *)(x + t * WIDE);
            _Pragma("GCC unroll 4") for (size_t r = 0; r < 4; r++) {
                const NAMED(Floats) value = value_at(b->values, 4 * at + r, kind) - none;
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) a[r][t] += value * inputs[t];
            }
        }
        if (!b->is_last) {
            _Pragma("GCC unroll 4") for (size_t r = 0; r < 4; r++)
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++)
                    *(NAMED(Loose) *)(partial + r * b->size + t * WIDE) = a[r][t];
            continue;
        }
        if (kind == INT8) {
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) {
                const float scale = b->scales[four + (size_t)r], bias = b->bias ? b->bias[four + (size_t)r] : 0;
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) a[r][t] = a[r][t] * scale + bias;
            }
        }
        float *y = b->y + four * b->y_plane + b->start;
        const float *addend = b->addend ? b->addend + four * b->addend_plane + b->start : NULL;
        if (b->count < (size_t)tile * WIDE || b->skip) { /* not all of the piece is there, or others write some of it */
            float all[4][MOST_PIECE * WIDE];
            _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++)
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) *(NAMED(Loose) *)(all[r] + t * WIDE) = a[r][t];
            for (size_t r = 0; r < 4; r++)
                for (size_t q = b->skip; q < b->count; q++) {
                    const float sum = addend ? all[r][q] + addend[r * b->addend_plane + q] : all[r][q];
                    y[r * b->y_plane + q] = b->activation == RELU && sum < 0 ? 0 : sum;
                }
        } else {
            _Pragma("GCC unroll 4") for (size_t r = 0; r < 4; r++)
                _Pragma("GCC unroll 8") for (int t = 0; t < tile; t++) {
                    if (addend) a[r][t] += *(const NAMED(Loose) *)(addend + r * b->addend_plane + (size_t)t * WIDE);
                    if (b->activation == RELU) a[r][t] = NAMED(positive)(a[r][t]);
                    *(NAMED(Loose) *)(y + r * b->y_plane + (size_t)t * WIDE) = a[r][t];
                }
        }
        if (b->activation > RELU)
            for (size_t r = 0; r < 4; r++) activated(b->activation, y + r * b->y_plane + b->skip, b->count - b->skip);
    }
}

#define ONE_PIECE(T)                                                                                                   \
    static void NAMED(fours_float_##T)(const Block *b) { NAMED(fours)(b, T, FLOAT); }                                  \
    static void NAMED(fours_bfloat16_##T)(const Block *b) { NAMED(fours)(b, T, BFLOAT16); }                            \
    static void NAMED(fours_int8_##T)(const Block *b) { NAMED(fours)(b, T, INT8); }
PIECES(ONE_PIECE)
#undef ONE_PIECE

#define OF_KINDS(T) {NAMED(fours_float_##T), NAMED(fours_bfloat16_##T), NAMED(fours_int8_##T)},
static void (*const NAMED(FOURS)[MOST_PIECE][3])(const Block *) = {PIECES(OF_KINDS)};
#undef OF_KINDS

/* A tile, piece by piece, without those that are not there. A piece that would be read beyond the image begins earlier,
and leaves the places alone that are another tile's. */
static void NAMED(pieces)(const Block *b) {
    const size_t vectors = b->size / WIDE, count = (vectors + MOST_PIECE - 1) / MOST_PIECE;
    for (size_t n = 0; n < count; n++) {
        const size_t first = vectors * n / count, own = vectors * (n + 1) / count - first, places = own * WIDE;
        const size_t before = first * WIDE, earlier = before + places > b->end ? before + places - b->end : 0;
        if (b->count <= before) return;
        Block piece = *b;
        piece.partial += before;
        piece.x -= (ptrdiff_t)earlier - (ptrdiff_t)before;
        piece.start -= earlier - before;
        piece.count = b->count + earlier - before > places ? places : b->count + earlier - before;
        piece.skip = earlier > before ? earlier - before : 0;
        NAMED(FOURS)[own - 1][b->kind](&piece);
    }
}
