/* The kept entries of a tensor back to their places, in plain C: what `secateur.encodings` decodes with where it can.

Law: no state, and nothing is believed: a function reads and writes inside the lengths that it is given, whatever the
bytes say, and several threads may call at once. It returns 0, or 1 for bytes that no tensor encodes to; what it has
written by then is of no meaning. Entries are unsigned bits of 1, 2, 4 or 8 bytes; `out` holds zeros beforehand.

Eight entries are expanded at a time, by a shuffle whose indices are those of their byte of the mask: gcc's general
shuffle, which is one or two instructions from AVX2 on, and a loop of eight loads elsewhere. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#define BITS_IN(word) ((size_t)__builtin_popcountll(word))
#define LOWEST(word) ((size_t)__builtin_ctzll(word))
#else
#define EXPORT
static size_t bits_in(uint64_t word) {
    size_t count = 0;
    for (; word; word &= word - 1) count++;
    return count;
}
#define BITS_IN(word) bits_in(word)
#define LOWEST(word) bits_in(((word) & -(word)) - 1)
#endif

/* TAKEN[m][j]: which of the next values entry j of a byte m takes; 8, a zero, where its bit is not set. */
#define COUNT(m) (((m) & 1) + ((m) >> 1 & 1) + ((m) >> 2 & 1) + ((m) >> 3 & 1) + ((m) >> 4 & 1) + ((m) >> 5 & 1) + ((m) >> 6 & 1))
#define TAKES(m, j) ((m) >> (j) & 1 ? COUNT((m) & ((1 << (j)) - 1)) : 8)
#define ONE(m) {TAKES(m, 0), TAKES(m, 1), TAKES(m, 2), TAKES(m, 3), TAKES(m, 4), TAKES(m, 5), TAKES(m, 6), TAKES(m, 7)}
#define FOUR(m) ONE(m), ONE((m) + 1), ONE((m) + 2), ONE((m) + 3)
#define SIXTEEN(m) FOUR(m), FOUR((m) + 4), FOUR((m) + 8), FOUR((m) + 12)
#define SIXTY_FOUR(m) SIXTEEN(m), SIXTEEN((m) + 16), SIXTEEN((m) + 32), SIXTEEN((m) + 48)
static const uint16_t TAKEN[256][8] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};

/* ------------------------------------------------------------------------------------------------------ a bitmask */

/* Eight entries from the next eight values, all of which are there. */
#define EIGHT_BY_LOADS(TYPE, WIDTH)                                                                                    \
    static inline void eight_##WIDTH(unsigned m, const TYPE *values, TYPE *out) {                                      \
        for (unsigned j = 0; j < 8; j++) out[j] = values[TAKEN[m][j] & 7] & (TYPE)(0 - (TYPE)(m >> j & 1));            \
    }

/* Indices have 16 bits because gcc 12 widens those to 32 and 64 by an instruction, and bytes one by one. */
#define EIGHT_BY_SHUFFLE(TYPE, WIDTH)                                                                                  \
    typedef TYPE Eight##WIDTH __attribute__((vector_size(8 * WIDTH)));                                                 \
    static inline void eight_##WIDTH(unsigned m, const TYPE *values, TYPE *out) {                                      \
        typedef uint16_t Indices __attribute__((vector_size(16)));                                                     \
        Indices indices;                                                                                               \
        Eight##WIDTH next;                                                                                             \
        const Eight##WIDTH none = {0};                                                                                 \
        memcpy(&indices, TAKEN[m], sizeof indices);                                                                    \
        memcpy(&next, values, sizeof next);                                                                            \
        next = __builtin_shuffle(next, none, __builtin_convertvector(indices, Eight##WIDTH));                          \
        memcpy(out, &next, sizeof next);                                                                               \
    }

#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__)
#define SHUFFLED EIGHT_BY_SHUFFLE
static const uint8_t TAKEN_BYTES[256][8] = {SIXTY_FOUR(0), SIXTY_FOUR(64), SIXTY_FOUR(128), SIXTY_FOUR(192)};
/* Bytes: the lower half of a vector of 16, whose upper half is zero. */
#define BYTES_SHUFFLED(TYPE, WIDTH)                                                                                    \
    static inline void eight_##WIDTH(unsigned m, const TYPE *values, TYPE *out) {                                      \
        typedef uint64_t Halves __attribute__((vector_size(16)));                                                      \
        typedef uint8_t Bytes __attribute__((vector_size(16)));                                                        \
        uint64_t next, indices;                                                                                        \
        memcpy(&next, values, 8);                                                                                      \
        memcpy(&indices, TAKEN_BYTES[m], 8);                                                                           \
        Halves found = (Halves)__builtin_shuffle((Bytes)(Halves){next, 0}, (Bytes)(Halves){indices, 0});               \
        next = found[0];                                                                                               \
        memcpy(out, &next, 8);                                                                                         \
    }
#else
#define BYTES_SHUFFLED EIGHT_BY_LOADS
#define SHUFFLED EIGHT_BY_LOADS
#endif

#define BITMASK(TYPE, WIDTH)                                                                                           \
    static int bitmask_##WIDTH(const uint8_t *restrict mask, size_t entries, const TYPE *restrict values,              \
                               size_t count, TYPE *restrict out) {                                                     \
        size_t at = 0, i = 0;                                                                                          \
        for (; i + 64 <= entries; i += 64) {                                                                           \
            uint64_t word;                                                                                             \
            memcpy(&word, mask + i / 8, 8);                                                                            \
            if (count - at < BITS_IN(word) + 8) break;                                                                 \
            for (size_t byte = 0; byte < 8; byte++) {                                                                  \
                unsigned m = mask[i / 8 + byte];                                                                       \
                eight_##WIDTH(m, values + at, out + i + 8 * byte);                                                     \
                at += BITS_IN(m);                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (; i < entries; i++)                                                                                       \
            if (mask[i / 8] >> i % 8 & 1) {                                                                            \
                if (at == count) return 1;                                                                             \
                out[i] = values[at++];                                                                                 \
            }                                                                                                          \
        return at != count || (entries % 8 && mask[entries / 8] >> entries % 8);                                       \
    }

/* ----------------------------------------------------------------------------------------------------------- rows */

/* Columns within rows of 2^8 or 2^16 entries: each row's ascend, and the last row may be short. */
#define ROWS(TYPE, WIDTH, COUNT_TYPE, COLUMN)                                                                          \
    static int rows_##WIDTH##_##COLUMN(const COUNT_TYPE *restrict counts, const COLUMN *restrict columns,              \
                                       size_t entries, const TYPE *restrict values, size_t count,                      \
                                       TYPE *restrict out) {                                                           \
        const size_t length = (size_t)1 << 8 * sizeof(COLUMN);                                                         \
        size_t at = 0, row = 0;                                                                                        \
        for (size_t first = 0; first < entries; first += length, row++) {                                              \
            size_t here = counts[row], left = entries - first;                                                         \
            if (here > count - at) return 1;                                                                           \
            if (!here) continue;                                                                                       \
            const COLUMN *column = columns + at;                                                                       \
            unsigned wrong = 0;                                                                                        \
            for (size_t each = 1; each < here; each++) wrong |= column[each] <= column[each - 1];                      \
            if (wrong || column[here - 1] >= left) return 1;                                                           \
            for (size_t each = 0; each < here; each++) out[first + column[each]] = values[at + each];                  \
            at += here;                                                                                                \
        }                                                                                                              \
        return at != count;                                                                                            \
    }

/* ---------------------------------------------------------------------------------------------------------- signs */

#define SIGNS(TYPE, WIDTH)                                                                                             \
    static int signs_##WIDTH(const uint8_t *restrict mask, size_t entries, const uint8_t *restrict signs,              \
                             size_t count, TYPE *restrict out) {                                                       \
        size_t at = 0;                                                                                                 \
        for (size_t first = 0; first < entries; first += 64) {                                                         \
            uint64_t removed = 0;                                                                                      \
            size_t last = entries - first < 64 ? entries - first : 64;                                                 \
            memcpy(&removed, mask + first / 8, (last + 7) / 8);                                                        \
            removed = ~removed & (last < 64 ? ((uint64_t)1 << last) - 1 : ~(uint64_t)0);                               \
            if (BITS_IN(removed) > count - at) return 1;                                                               \
            for (; removed; removed &= removed - 1, at++)                                                              \
                out[first + LOWEST(removed)] |= (TYPE)((TYPE)(signs[at / 8] >> at % 8 & 1) << (8 * WIDTH - 1));        \
        }                                                                                                              \
        return at != count;                                                                                            \
    }

#define ALL(TYPE, WIDTH, EIGHT)                                                                                        \
    EIGHT(TYPE, WIDTH)                                                                                                 \
    BITMASK(TYPE, WIDTH)                                                                                               \
    ROWS(TYPE, WIDTH, uint16_t, uint8_t)                                                                               \
    ROWS(TYPE, WIDTH, uint32_t, uint16_t)                                                                              \
    SIGNS(TYPE, WIDTH)

ALL(uint8_t, 1, BYTES_SHUFFLED)
ALL(uint16_t, 2, SHUFFLED)
ALL(uint32_t, 4, SHUFFLED)
ALL(uint64_t, 8, SHUFFLED)

/* ------------------------------------------------------------------------------------------------------- exported */

/* mask: one bit for each entry, (entries + 7) / 8 bytes. values: `count` entries of `width` bytes. */
EXPORT int secateur_expand_bitmask(const void *mask, size_t entries, const void *values, size_t count, void *out,
                                   size_t width) {
    switch (width) {
    case 1: return bitmask_1(mask, entries, values, count, out);
    case 2: return bitmask_2(mask, entries, values, count, out);
    case 4: return bitmask_4(mask, entries, values, count, out);
    case 8: return bitmask_8(mask, entries, values, count, out);
    }
    return 1;
}

/* How many bits are set in `size` bytes. */
EXPORT size_t secateur_expand_count(const uint8_t *mask, size_t size) {
    size_t count = 0, i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, mask + i, 8);
        count += BITS_IN(word);
    }
    for (; i < size; i++) count += BITS_IN(mask[i]);
    return count;
}

/* counts: for each row of 2^bits entries, uint16 for 8 bits and uint32 for 16. columns: `count`, of `bits` bits. */
EXPORT int secateur_expand_rows(const void *counts, const void *columns, size_t bits, size_t entries,
                                const void *values, size_t count, void *out, size_t width) {
    switch (width + bits) {
    case 9: return rows_1_uint8_t(counts, columns, entries, values, count, out);
    case 10: return rows_2_uint8_t(counts, columns, entries, values, count, out);
    case 12: return rows_4_uint8_t(counts, columns, entries, values, count, out);
    case 16: return rows_8_uint8_t(counts, columns, entries, values, count, out);
    case 17: return rows_1_uint16_t(counts, columns, entries, values, count, out);
    case 18: return rows_2_uint16_t(counts, columns, entries, values, count, out);
    case 20: return rows_4_uint16_t(counts, columns, entries, values, count, out);
    case 24: return rows_8_uint16_t(counts, columns, entries, values, count, out);
    }
    return 1;
}

/* The highest bit of those entries that the mask does not keep and whose bit in `signs` is set; `count` bits. */
EXPORT int secateur_expand_signs(const void *mask, size_t entries, const void *signs, size_t count, void *out,
                                 size_t width) {
    switch (width) {
    case 1: return signs_1(mask, entries, signs, count, out);
    case 2: return signs_2(mask, entries, signs, count, out);
    case 4: return signs_4(mask, entries, signs, count, out);
    case 8: return signs_8(mask, entries, signs, count, out);
    }
    return 1;
}

/* One byte of each of `count` entries of `width` bytes, to every width-th place of `out`. */
EXPORT void secateur_expand_plane(const uint8_t *restrict bytes, size_t count, uint8_t *restrict out, size_t width) {
    for (size_t i = 0; i < count; i++) out[i * width] = bytes[i];
}
