/* Products of a sparse matrix with a few vectors, in plain C: y[b] = W x[b] + bias.

Law: no intrinsics but those for bytes, beside loops that do the same; no state but whose threads to use; a call writes y and nothing else, and several threads may
call at once. What is read is what the caller has validated: `secateur.kernels` checks every index and pointer before.

Loops over 16 lanes, and the vector types of gcc and clang, become whatever width the machine has. `GCC unroll 1` keeps
gcc from unrolling them into scalars before it looks for vectors; built without loop distribution, accumulators stay in
registers (with it gcc 12 makes a memset of their zeros, and then they stay in memory: twice the time). Single entries
of x are loaded one by one: on the machines measured the processor's gather was slower (docs/notes/kernels.md). */

#include "rounding.h"
#include "threads.h"

#include <pthread.h>
#include <stdlib.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define PREFETCH(address) __builtin_prefetch(address)
/* may lie beyond the end: the processor then does nothing */
#define PREFETCH_FAR(address) __builtin_prefetch((const void *)(address), 0, 2)
#define VECTOR __attribute__((vector_size(4 * WIDE)))

#define LANES _Pragma("GCC unroll 1") for (size_t l = 0; l < 16; l++)

enum { LANE = 16, WIDEST = 64, CHUNK = 256, AHEAD = 16, BLOCK_BYTES = 4 << 20 };
enum { WINDOW = 32, STEPS = 6, BITS = 5 };

/* Vectors of the batch that a tile of 16 outputs meets at once: as many as there are registers for. */
#if defined(__AVX512F__)
enum { TILE = 16 };
#elif defined(__AVX__) || defined(__aarch64__)
enum { TILE = 4 };
#else
enum { TILE = 2 };
#endif

/* The processor asks for memory too late; asking 4 kB ahead, into the second cache, took an eighth to a sixth off the
time for one vector, and a twelfth for 16. */
enum { FAR = 4096 };

/* Numbers in a vector of the processor. */
#if defined(__AVX512F__)
enum { WIDE = 16 };
#elif defined(__AVX2__)
enum { WIDE = 8 };
#else
enum { WIDE = 4 };
#endif
typedef float Floats VECTOR;
typedef int32_t Signed VECTOR;
typedef uint32_t Bits VECTOR;

typedef struct {
    const uint16_t *indices;  /* the column of each kept entry, or of each block of 16 outputs */
    const uint32_t *words;    /* windows: six numbers of 5 bits for each of 16 outputs */
    const uint8_t *moves;     /* windows: by how many inputs each step goes on */
    const int32_t *order;     /* windows: the output of each lane, or -1 */
    const uint32_t *pointers; /* where a row's entries (of one panel), or a slice's groups, begin; and the end */
    const void *values;       /* of a kind */
    const float *scales;      /* of int8 values: what each output is multiplied by, before the bias */
    const float *bias;        /* or NULL */
    const float *x;           /* (batch, columns) */
    float *y;                 /* (batch, rows) */
    size_t rows, columns, batch;
    size_t rows_together, panels; /* CSR: panels of columns, within blocks of that many rows */
    int kind;     /* of the values */
    int has_vnni; /* whether the processor multiplies bytes by fours */
} Product;

typedef struct {
    const Product *product;
    size_t first_row, end_row, first, end; /* rows (or blocks of rows) and vectors of the batch */
    int failed;
} Part;

/* ------------------------------------------------------------------------------------------------------ entries */

INLINE Floats floats(const float *from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* As many bytes as a vector has numbers. gcc makes eight instructions of the loop, and one of what is named. */
INLINE Floats whole_numbers(const int8_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    float wide[WIDE];
    for (int l = 0; l < WIDE; l++) wide[l] = (float)from[l];
    return floats(wide);
#endif
}

/* 16 values from a place on. */
INLINE void sixteen(const void *values, size_t at, int kind, float out[LANE]) {
    if (kind == INT8)
        for (size_t l = 0; l < LANE; l += WIDE) {
            Floats some = whole_numbers((const int8_t *)values + at + l);
            memcpy(out + l, &some, sizeof some);
        }
    else LANES out[l] = value_at(values, at + l, kind);
}

/* Asks for what comes long after `count` values (and their indices, if not NULL). */
INLINE void ask_ahead(const uint16_t *indices, const void *values, size_t at, size_t count, int kind) {
    size_t size = SIZES[kind];
    for (size_t line = 0; line < count * size; line += 64) PREFETCH_FAR((uintptr_t)values + at * size + line + FAR);
    if (indices) PREFETCH_FAR((uintptr_t)indices + at * 2 + FAR / size * 2);
}

/* What an output is made of its sum. */
INLINE float biased(const Product *p, size_t row, float sum, int kind) {
    return (kind == INT8 ? sum * p->scales[row] : sum) + (p->bias ? p->bias[row] : 0);
}

/* x of some vectors, transposed: (columns, width), zero where there is no vector. */
static void transpose(const float *restrict x, size_t count, size_t columns, size_t width, float *restrict out) {
    for (size_t left = 0; left < columns; left += LANE) {
        size_t right = left + LANE < columns ? left + LANE : columns;
        for (size_t b = 0; b < count; b++)
            for (size_t c = left; c < right; c++) out[c * width + b] = x[b * columns + c];
        for (size_t b = count; b < width; b++)
            for (size_t c = left; c < right; c++) out[c * width + b] = 0;
    }
}

static size_t width_for(size_t count) { return count > 32 ? 64 : count > 16 ? 32 : 16; }

/* ---------------------------------------------------------------------------------------------- CSR, one vector */

INLINE float dot(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                 const float *restrict x, int kind) {
    float a[LANE], b[LANE];
    LANES a[l] = 0;
    LANES b[l] = 0;
    for (; at + 2 * LANE <= end; at += 2 * LANE) {
        ask_ahead(indices, values, at, 2 * LANE, kind);
        float va[LANE], vb[LANE];
        sixteen(values, at, kind, va);
        sixteen(values, at + LANE, kind, vb);
        LANES a[l] += va[l] * x[indices[at + l]];
        LANES b[l] += vb[l] * x[indices[at + LANE + l]];
    }
    float sum = 0;
    for (; at < end; at++) sum += value_at(values, at, kind) * x[indices[at]];
    for (int l = 0; l < LANE; l++) sum += a[l] + b[l];
    return sum;
}

INLINE void csr_one(const Part *part, int kind) {
    const Product *p = part->product;
    for (size_t b = part->first; b < part->end; b++) {
        const float *x = p->x + b * p->columns;
        float *y = p->y + b * p->rows;
        for (size_t top = part->first_row; top < part->end_row; top += p->rows_together) {
            size_t count = part->end_row - top < p->rows_together ? part->end_row - top : p->rows_together;
            const uint32_t *pointer = p->pointers + top * p->panels;
            for (size_t r = top; r < top + count; r++) y[r] = kind == INT8 ? 0 : biased(p, r, 0, kind);
            for (size_t panel = 0; panel < p->panels; panel++)
                for (size_t r = top; r < top + count; r++, pointer++)
                    y[r] += dot(p->indices, p->values, pointer[0], pointer[1], x, kind);
            for (size_t r = top; kind == INT8 && r < top + count; r++) y[r] = biased(p, r, y[r], kind);
        }
    }
}

/* ------------------------------------------------------------------------------------------ CSR, several vectors */

/* One row's entries in one panel, times 16, 32 or 64 vectors: sums (width) += value * x[index] (width). Four
accumulators each, for an addition takes four cycles. */
INLINE void row_16(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int kind) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = 0;
    LANES c[l] = 0;
    LANES d[l] = 0;
    for (; at + 4 <= end; at += 4) {
        const float *xa = x + (size_t)indices[at] * 16, *xb = x + (size_t)indices[at + 1] * 16;
        const float *xc = x + (size_t)indices[at + 2] * 16, *xd = x + (size_t)indices[at + 3] * 16;
        ask_ahead(indices, values, at, 4, kind);
        float va = value_at(values, at, kind), vb = value_at(values, at + 1, kind);
        float vc = value_at(values, at + 2, kind), vd = value_at(values, at + 3, kind);
        LANES a[l] += va * xa[l];
        LANES b[l] += vb * xb[l];
        LANES c[l] += vc * xc[l];
        LANES d[l] += vd * xd[l];
    }
    for (; at < end; at++) {
        const float *xa = x + (size_t)indices[at] * 16;
        float va = value_at(values, at, kind);
        LANES a[l] += va * xa[l];
    }
    LANES sums[l] = (a[l] + b[l]) + (c[l] + d[l]);
}

INLINE void row_32(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int kind) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = sums[16 + l];
    LANES c[l] = 0;
    LANES d[l] = 0;
    for (; at + 2 <= end; at += 2) {
        const float *xa = x + (size_t)indices[at] * 32, *xc = x + (size_t)indices[at + 1] * 32;
        float va = value_at(values, at, kind), vc = value_at(values, at + 1, kind);
        LANES a[l] += va * xa[l];
        LANES b[l] += va * xa[16 + l];
        LANES c[l] += vc * xc[l];
        LANES d[l] += vc * xc[16 + l];
    }
    if (at < end) {
        const float *xa = x + (size_t)indices[at] * 32;
        float va = value_at(values, at, kind);
        LANES a[l] += va * xa[l];
        LANES b[l] += va * xa[16 + l];
    }
    LANES sums[l] = a[l] + c[l];
    LANES sums[16 + l] = b[l] + d[l];
}

INLINE void row_64(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int kind) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = sums[16 + l];
    LANES c[l] = sums[32 + l];
    LANES d[l] = sums[48 + l];
    for (; at < end; at++) {
        const float *xa = x + (size_t)indices[at] * 64;
        float va = value_at(values, at, kind);
        LANES a[l] += va * xa[l];
        LANES b[l] += va * xa[16 + l];
        LANES c[l] += va * xa[32 + l];
        LANES d[l] += va * xa[48 + l];
    }
    LANES sums[l] = a[l];
    LANES sums[16 + l] = b[l];
    LANES sums[32 + l] = c[l];
    LANES sums[48 + l] = d[l];
}

/* `width` is a constant where this is inlined. */
INLINE void csr_rows(const Part *part, size_t first, size_t count, const float *x, float *sums, const size_t width,
                     int kind) {
    const Product *p = part->product;
    for (size_t top = part->first_row; top < part->end_row; top += p->rows_together) {
        size_t rows = part->end_row - top < p->rows_together ? part->end_row - top : p->rows_together;
        const uint32_t *pointer = p->pointers + top * p->panels;
        for (size_t r = 0; r < rows; r++)
            for (size_t l = 0; l < width; l++) sums[r * width + l] = kind == INT8 ? 0 : biased(p, top + r, 0, kind);
        for (size_t panel = 0; panel < p->panels; panel++)
            for (size_t r = 0; r < rows; r++, pointer++) {
                float *out = sums + r * width;
                if (width == 16) row_16(p->indices, p->values, pointer[0], pointer[1], x, out, kind);
                if (width == 32) row_32(p->indices, p->values, pointer[0], pointer[1], x, out, kind);
                if (width == 64) row_64(p->indices, p->values, pointer[0], pointer[1], x, out, kind);
            }
        for (size_t left = 0; left < rows; left += LANE) {
            size_t right = left + LANE < rows ? left + LANE : rows;
            for (size_t b = 0; b < count; b++)
                for (size_t r = left; r < right; r++) {
                    float sum = sums[r * width + b];
                    p->y[(first + b) * p->rows + top + r] = kind == INT8 ? biased(p, top + r, sum, kind) : sum;
                }
        }
    }
}

INLINE void csr_several(Part *part, int kind) {
    const Product *p = part->product;
    float *x = malloc((p->columns + 1) * WIDEST * sizeof(float));
    float *sums = malloc((p->rows_together + 1) * WIDEST * sizeof(float));
    part->failed = !x || !sums;
    for (size_t first = part->first; first < part->end && !part->failed;) {
        size_t left = part->end - first, width = width_for(left), count = left < width ? left : width;
        transpose(p->x + first * p->columns, count, p->columns, width, x);
        if (width == 16) csr_rows(part, first, count, x, sums, 16, kind);
        if (width == 32) csr_rows(part, first, count, x, sums, 32, kind);
        if (width == 64) csr_rows(part, first, count, x, sums, 64, kind);
        first += count;
    }
    free(x);
    free(sums);
}

static void *csr_part(void *argument) {
    Part *part = argument;
    int kind = part->product->kind;
    if (part->product->batch == 1) {
        if (kind == FLOAT) csr_one(part, FLOAT);
        else if (kind == BFLOAT16) csr_one(part, BFLOAT16);
        else csr_one(part, INT8);
    } else {
        if (kind == FLOAT) csr_several(part, FLOAT);
        else if (kind == BFLOAT16) csr_several(part, BFLOAT16);
        else csr_several(part, INT8);
    }
    return NULL;
}

/* ------------------------------------------------------------------------- blocks: 16 outputs share their inputs */

INLINE void block_store(const Product *p, size_t b, size_t block, const float *sums, int kind) {
    size_t top = block * LANE, count = p->rows - top < LANE ? p->rows - top : LANE;
    float *y = p->y + b * p->rows + top;
    for (size_t l = 0; l < count; l++) y[l] = biased(p, top + l, sums[l], kind);
}

INLINE void block_one(const Part *part, int kind) {
    const Product *p = part->product;
    const uint16_t *restrict indices = p->indices;
    const void *restrict values = p->values;
    const float *restrict x = p->x;
    for (size_t block = part->first_row; block < part->end_row; block++) {
        size_t at = p->pointers[block], end = p->pointers[block + 1];
        float a[LANE], b[LANE], c[LANE], d[LANE];
        LANES a[l] = 0;
        LANES b[l] = 0;
        LANES c[l] = 0;
        LANES d[l] = 0;
        for (; at + 4 <= end; at += 4) {
            ask_ahead(NULL, values, at * LANE, 4 * LANE, kind);
            float xa = x[indices[at]], xb = x[indices[at + 1]], xc = x[indices[at + 2]], xd = x[indices[at + 3]];
            float va[LANE], vb[LANE], vc[LANE], vd[LANE];
            sixteen(values, at * LANE, kind, va);
            sixteen(values, (at + 1) * LANE, kind, vb);
            sixteen(values, (at + 2) * LANE, kind, vc);
            sixteen(values, (at + 3) * LANE, kind, vd);
            LANES a[l] += va[l] * xa;
            LANES b[l] += vb[l] * xb;
            LANES c[l] += vc[l] * xc;
            LANES d[l] += vd[l] * xd;
        }
        for (; at < end; at++) {
            float xa = x[indices[at]];
            float va[LANE];
            sixteen(values, at * LANE, kind, va);
            LANES a[l] += va[l] * xa;
        }
        LANES a[l] = (a[l] + b[l]) + (c[l] + d[l]);
        block_store(p, 0, block, a, kind);
    }
}

/* 16 outputs times TILE vectors, all sums in registers. Which inputs come next no hardware guesses: asking for those of
the block 16 further on takes a quarter off the time at 256 vectors. */
INLINE void block_tile(const Product *p, size_t at, size_t end, const float *restrict x, float sums[TILE][LANE],
                       int kind) {
    const uint16_t *restrict indices = p->indices;
    const void *restrict values = p->values;
    float a[TILE][LANE];
    _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) LANES a[b][l] = 0;
    for (; at < end; at++) {
        const float *xs = x + (size_t)indices[at] * LANE;
        PREFETCH(at + AHEAD < end ? x + (size_t)indices[at + AHEAD] * LANE : xs);
        float w[LANE];
        sixteen(values, at * LANE, kind, w);
        _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) {
            float xb = xs[b];
            LANES a[b][l] += w[l] * xb;
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) LANES sums[b][l] = a[b][l];
}

/* Blocks whose values stay in the third cache meet all the vectors of a chunk, 16 at a time, before the next ones. Less
than that would read the vectors too often: 512 kB took 1.3 times as long at 256 vectors. */
INLINE void block_several(Part *part, int kind) {
    const Product *p = part->product;
    size_t most = part->end - part->first < CHUNK ? part->end - part->first : CHUNK;
    size_t strips = (most + LANE - 1) / LANE, bytes = LANE * SIZES[kind];
    float *x = malloc((p->columns + 1) * strips * LANE * sizeof(float));
    part->failed = !x;
    for (size_t first = part->first; first < part->end && x; first += CHUNK) {
        size_t count = part->end - first < CHUNK ? part->end - first : CHUNK;
        for (size_t b = 0; b < count; b += LANE)
            transpose(p->x + (first + b) * p->columns, count - b < LANE ? count - b : LANE, p->columns, LANE,
                      x + b * p->columns);
        for (size_t block = part->first_row, next; block < part->end_row; block = next) {
            size_t limit = p->pointers[block] + BLOCK_BYTES / bytes;
            for (next = block + 1; next < part->end_row && p->pointers[next + 1] <= limit;) next++;
            for (size_t strip = 0; strip < count; strip += LANE)
                for (size_t each = block; each < next; each++)
                    for (size_t b = strip; b < strip + LANE && b < count; b += TILE) {
                        float sums[TILE][LANE];
                        block_tile(p, p->pointers[each], p->pointers[each + 1], x + strip * p->columns + (b - strip),
                                   sums, kind);
                        for (size_t t = 0; t < TILE && b + t < count; t++)
                            block_store(p, first + b + t, each, sums[t], kind);
                    }
        }
    }
    free(x);
}

static void *block_part(void *argument) {
    Part *part = argument;
    int kind = part->product->kind;
    if (part->product->batch == 1) {
        if (kind == FLOAT) block_one(part, FLOAT);
        else if (kind == BFLOAT16) block_one(part, BFLOAT16);
        else block_one(part, INT8);
    } else {
        if (kind == FLOAT) block_several(part, FLOAT);
        else if (kind == BFLOAT16) block_several(part, BFLOAT16);
        else block_several(part, INT8);
    }
    return NULL;
}

/* ------------------------------------------------------- blocks of int8 values, and inputs that are rounded as they come */

typedef uint32_t Words __attribute__((vector_size(64)));

/* Outputs of a block whose sums for 16 vectors stay in registers. */
#if defined(__AVX512F__)
enum { OUTPUTS_AT_ONCE = 16 };
#else
enum { OUTPUTS_AT_ONCE = 4 };
#endif

INLINE Words words(const void *from) {
    Words value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* 16 bytes as 16 numbers. */
INLINE Words widened(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    uint32_t wide[LANE];
    LANES wide[l] = from[l];
    return words(wide);
#endif
}

INLINE float unrounded(const Product *p, size_t row, uint32_t sum, uint32_t of_weights, const Rounded *r) {
    const int32_t whole = (int32_t)(sum - (uint32_t)r->zero * of_weights);
    return (float)whole * (r->scale * p->scales[row]) + (p->bias ? p->bias[row] : 0);
}

static Rounded round_vector(const float *restrict x, size_t columns, uint8_t *restrict codes) {
    const Rounded r = rounded_for(extremes(x, columns));
    to_codes(x, columns, r, codes);
    return r;
}

/* Any processor: bytes as 32 bits. */
INLINE Words plus_bytes(Words sums, Words inputs, Words weights) {
    typedef int32_t Numbers __attribute__((vector_size(64)));
    for (int byte = 0; byte < 4; byte++)
        sums += ((inputs >> (8 * byte)) & 255) * (Words)((Numbers)(weights << (24 - 8 * byte)) >> 24);
    return sums;
}

#define QUADS(name) name
#define ON
#define PLUS(sums, inputs, weights) plus_bytes(sums, inputs, weights)
#include "quads.h"
#undef QUADS
#undef ON
#undef PLUS

/* The one instruction that is asked for by name: VNNI's, which no loop over 16 times four bytes becomes. */
#if defined(__AVX512F__)
#define QUADS(name) name##_vnni
#define ON __attribute__((target("avx512vnni")))
#define PLUS(sums, inputs, weights) (Words) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(inputs), (__m512i)(weights))
#include "quads.h"
#undef QUADS
#undef ON
#undef PLUS
#endif

static void quads_of_vector(const Product *p, size_t block, const uint8_t *x, const Rounded *r, float *y) {
#if defined(__AVX512F__)
    if (p->has_vnni) quads_one_vnni(p, block, x, r, y);
    else
#endif
        quads_one(p, block, x, r, y);
}

static void quads_of_strip(const Product *p, size_t block, const uint8_t *x, const Rounded *r, float *y, size_t count) {
#if defined(__AVX512F__)
    if (p->has_vnni) quads_strip_vnni(p, block, x, r, y, count);
    else
#endif
        quads_strip(p, block, x, r, y, count);
}

/* As block_several: blocks whose values stay in the third cache meet all vectors of a chunk. */
static void *quads_part(void *argument) {
    Part *part = argument;
    const Product *p = part->product;
    const size_t left = part->end - part->first, most = left < CHUNK ? left : CHUNK, columns = p->columns;
    const size_t strips = (most + LANE - 1) / LANE;
    uint8_t *codes = malloc((columns + 1) * (strips + 1) * LANE);
    part->failed = !codes;
    for (size_t first = part->first; first < part->end && codes; first += CHUNK) {
        const size_t count = part->end - first < CHUNK ? part->end - first : CHUNK;
        Rounded rounded[CHUNK];
        uint8_t *rows = codes + strips * columns * LANE; /* of 16 vectors, one after the other */
        for (size_t strip = 0; strip < count; strip += LANE) {
            uint8_t *out = codes + strip * columns;
            const size_t vectors = count - strip < LANE ? count - strip : LANE;
            for (size_t b = 0; b < vectors; b++)
                rounded[strip + b] = round_vector(p->x + (first + strip + b) * columns, columns, rows + b * columns);
            if (p->batch == 1) memcpy(out, rows, columns);
            for (size_t c = 0; p->batch > 1 && c < columns; c++)
                for (size_t b = 0; b < LANE; b++) out[c * LANE + b] = b < vectors ? rows[b * columns + c] : 0;
        }
        for (size_t block = part->first_row, next; block < part->end_row; block = next) {
            const size_t limit = p->pointers[block] + BLOCK_BYTES / LANE;
            for (next = block + 1; next < part->end_row && p->pointers[next + 1] <= limit;) next++;
            for (size_t strip = 0; strip < count; strip += LANE)
                for (size_t each = block; each < next; each++) {
                    float *y = p->y + (first + strip) * p->rows;
                    const uint8_t *x = codes + strip * columns;
                    if (p->batch == 1) quads_of_vector(p, each, x, rounded, y);
                    else quads_of_strip(p, each, x, rounded + strip, y, count - strip < LANE ? count - strip : LANE);
                }
        }
    }
    free(codes);
    return NULL;
}

/* -------------------------------------------------------------------- windows: 16 rows walk through x together */

INLINE Bits bits(const void *from) {
    Bits value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* x[number % 32] for each number: one instruction of AVX-512 for 16 numbers, ten of AVX2 for 8. clang has no shuffle by
numbers that are not constant. */
INLINE Floats picked(const float *x, Bits number) {
#if defined(__AVX512F__) && !defined(__clang__)
    return __builtin_shuffle(floats(x), floats(x + 16), (Signed)number);
#elif defined(__AVX2__) && !defined(__clang__)
    Signed at = (Signed)number, in_second = (Signed)(number << 28) < 0, in_upper = (Signed)(number << 27) < 0;
    Signed a = (Signed)__builtin_shuffle(floats(x), at), b = (Signed)__builtin_shuffle(floats(x + 8), at);
    Signed c = (Signed)__builtin_shuffle(floats(x + 16), at), d = (Signed)__builtin_shuffle(floats(x + 24), at);
    Signed lower = (b & in_second) | (a & ~in_second), upper = (d & in_second) | (c & ~in_second);
    return (Floats)((upper & in_upper) | (lower & ~in_upper));
#else
    Floats value = {0};
    for (int l = 0; l < WIDE; l++) value[l] = x[number[l] % WINDOW];
    return value;
#endif
}

/* The sums of a slice's 16 rows for `tile` vectors, which follow one another in x. A lane that takes nothing in a step
has the value 0 there, and must not multiply even that: x may be infinite. */
INLINE void window_slice(const Product *p, size_t slice, const float *x, float sums[][LANE], const int tile,
                         int kind) {
    enum { PARTS = LANE / WIDE };
    const int turns = tile > 1 ? 1 : 2; /* an addition takes four cycles, a step of one vector two */
    const size_t bytes = STEPS * LANE * SIZES[kind];
    Floats a[4][2][PARTS];
    for (int b = 0; b < tile; b++)
        for (int turn = 0; turn < turns; turn++)
            for (int part = 0; part < PARTS; part++) a[b][turn][part] = (Floats){0};
    for (size_t group = p->pointers[slice]; group < p->pointers[slice + 1]; group++) {
        const uint32_t *words = p->words + group * LANE;
        const char *values = (const char *)p->values + group * bytes;
        for (size_t line = 0; line < bytes; line += 64) PREFETCH_FAR((uintptr_t)values + FAR + line);
        PREFETCH_FAR((uintptr_t)words + (uintptr_t)FAR * LANE * 4 / bytes);
        _Pragma("GCC unroll 6") for (int step = 0; step < STEPS; step++) {
            x += p->moves[group * STEPS + (size_t)step];
            for (int part = 0; part < PARTS; part++) {
                Bits number = bits(words + part * WIDE) >> (BITS * step);
                Floats value;
                if (kind == INT8) {
                    value = whole_numbers((const int8_t *)values + step * LANE + part * WIDE);
                } else if (kind == BFLOAT16) { /* two steps share 32 bits */
                    Bits both = bits(values + (step / 2) * 64 + part * WIDE * 4);
                    value = (Floats)(step % 2 ? both & 0xffff0000u : both << 16);
                } else {
                    value = floats((const float *)values + step * LANE + part * WIDE);
                }
                Signed taken = value != 0;
                for (int b = 0; b < tile; b++) {
                    Floats input = (Floats)((Signed)picked(x + (size_t)b * p->columns, number) & taken);
                    a[b][step % turns][part] += value * input;
                }
            }
        }
    }
    for (int b = 0; b < tile; b++)
        for (int part = 0; part < PARTS; part++) {
            if (turns == 2) a[b][0][part] += a[b][1][part];
            memcpy(sums[b] + part * WIDE, &a[b][0][part], sizeof(Floats));
        }
}

/* A slice stays in the second cache while all vectors meet it, four at a time. */
INLINE void windows(const Part *part, int kind) {
    const Product *p = part->product;
    for (size_t slice = part->first_row; slice < part->end_row; slice++)
        for (size_t b = part->first, tile; b < part->end; b += tile) {
            float sums[4][LANE];
            const float *x = p->x + b * p->columns;
            tile = part->end - b >= 4 ? 4 : part->end - b >= 2 ? 2 : 1;
            if (tile == 4) window_slice(p, slice, x, sums, 4, kind);
            if (tile == 2) window_slice(p, slice, x, sums, 2, kind);
            if (tile == 1) window_slice(p, slice, x, sums, 1, kind);
            for (size_t t = 0; t < tile; t++)
                for (size_t l = 0; l < LANE; l++) {
                    int32_t row = p->order[slice * LANE + l];
                    if (row >= 0) p->y[(b + t) * p->rows + (size_t)row] = biased(p, (size_t)row, sums[t][l], kind);
                }
        }
}

static void *window_part(void *argument) {
    Part *part = argument;
    int kind = part->product->kind;
    if (kind == FLOAT) windows(part, FLOAT);
    else if (kind == BFLOAT16) windows(part, BFLOAT16);
    else windows(part, INT8);
    return NULL;
}

#include "picks.h"

/* ------------------------------------------------------------------------------------------------------- threads */

/* What starts a team of threads that each call the function, and waits for them: the one of the OpenMP runtime that
torch runs on, which `secateur.kernels` hands over. NULL: threads of our own. Threads of a team go on looking for work
for some milliseconds after torch's last operation, on the very processors that threads of our own would need. */
typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);
static Team team = NULL;

typedef struct {
    void *(*work)(void *);
    char *parts;
    size_t size, count, next;
} Job;

/* Takes parts until none is left: a team may be smaller than it was asked to be. */
static void member(void *argument) {
    Job *job = argument;
    for (size_t n; (n = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count;)
        job->work(job->parts + n * job->size);
}

/* Threads of our own are made for the call and joined at its end: 20 to 40 microseconds each. The caller's thread does
the first part, and any part for which no thread could be had. */
static void in_own_threads(void *(*work)(void *), char *parts, size_t size, size_t count) {
    pthread_t threads[MOST_THREADS];
    int started[MOST_THREADS] = {0};
    for (size_t n = 1; n < count; n++) started[n] = pthread_create(&threads[n], NULL, work, parts + n * size) == 0;
    work(parts);
    for (size_t n = 1; n < count; n++) {
        if (started[n]) pthread_join(threads[n], NULL);
        else work(parts + n * size);
    }
}

void secateur_in_threads(void *(*work)(void *), void *parts, size_t size, size_t count) {
    Job job = {work, parts, size, count, 0};
    Team now = __atomic_load_n(&team, __ATOMIC_RELAXED);
    if (count == 1) work(parts);
    else if (count && now) now(member, &job, (unsigned)count, 0);
    else if (count) in_own_threads(work, parts, size, count);
}

/* A large batch is cut by vectors, a small one by rows, with as many entries for each thread. `unit` rows stay
together. */
static int run(void *(*work)(void *), const Product *p, size_t rows, size_t unit, size_t panels, size_t threads) {
    Part parts[MOST_THREADS];
    size_t count = 0;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    if (p->batch >= threads * WIDEST) {
        size_t share = (p->batch / threads + WIDEST - 1) / WIDEST * WIDEST;
        for (size_t first = 0; first < p->batch; first += share, count++) {
            size_t end = p->batch - first < share ? p->batch : first + share;
            parts[count] = (Part){p, 0, rows, first, end, 0};
        }
    } else {
        uint64_t total = p->pointers[rows * panels];
        for (size_t row = 0, n = 1; n <= threads && row < rows; n++) {
            size_t end = row;
            while (end < rows && (end == row || n == threads || p->pointers[end * panels] < total * n / threads)) {
                end += unit;
                if (end > rows) end = rows;
            }
            parts[count++] = (Part){p, row, end, 0, p->batch, 0};
            row = end;
        }
    }
    secateur_in_threads(work, parts, sizeof *parts, count);
    int failed = 0;
    for (size_t n = 0; n < count; n++) failed |= parts[n].failed;
    return failed;
}

/* ------------------------------------------------------------------------------------------------------ exported */

/* All return 0, or 1 where memory could not be had. */
EXPORT int secateur_csr(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *scales, const float *bias,
                        const float *x, float *y, size_t rows, size_t columns, size_t batch, size_t rows_together,
                        size_t panels, int kind, size_t threads) {
    Product p = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .x = x, .y = y, .rows = rows,
                 .columns = columns, .batch = batch, .rows_together = rows_together, .panels = panels,
                 .kind = kind};
    return run(csr_part, &p, rows, panels > 1 ? rows_together : 1, panels, threads);
}

EXPORT int secateur_block(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *scales, const float *bias,
                          const float *x, float *y, size_t rows, size_t columns, size_t batch, int kind,
                          size_t threads) {
    Product p = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .x = x, .y = y, .rows = rows,
                 .columns = columns, .batch = batch, .kind = kind};
    return run(block_part, &p, (rows + LANE - 1) / LANE, 1, 1, threads);
}

/* Values (kept blocks / 4, 16, 4) in int8, and inputs rounded to 8 bits as they come; where each block of rows begins is a
multiple of 4. */
EXPORT int secateur_quads(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *scales,
                          const float *bias, const float *x, float *y, size_t rows, size_t columns, size_t batch,
                          int kind, size_t threads) {
    Product p = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .x = x,
                 .y = y, .rows = rows, .columns = columns, .batch = batch, .kind = kind};
#if defined(__AVX512F__)
    __builtin_cpu_init();
    p.has_vnni = __builtin_cpu_supports("avx512vnni");
#endif
    return run(quads_part, &p, (rows + LANE - 1) / LANE, 1, 1, threads);
}

/* x has at least 32 columns; within a slice the moves add up to no more than columns - 32. */
EXPORT int secateur_window(const uint32_t *words, const uint32_t *pointers, const void *values, const float *scales, const float *bias,
                           const uint8_t *moves, const int32_t *order, const float *x, float *y, size_t rows,
                           size_t columns, size_t batch, size_t slices, int kind, size_t threads) {
    Product p = {.words = words, .moves = moves, .order = order, .pointers = pointers, .values = values, .scales = scales, .bias = bias,
                 .x = x, .y = y, .rows = rows, .columns = columns, .batch = batch, .kind = kind};
    return run(window_part, &p, slices, 1, 1, threads);
}

/* Values (groups, 96) in int8, and inputs rounded to 8 bits as they come. */
EXPORT int secateur_picks(const uint32_t *words, const uint32_t *pointers, const void *values, const float *scales,
                          const float *bias, const uint8_t *moves, const int32_t *order, const float *x, float *y,
                          size_t rows, size_t columns, size_t batch, size_t slices, int kind, size_t threads) {
    Product p = {.words = words, .moves = moves, .order = order, .pointers = pointers, .values = values, .scales = scales,
                 .bias = bias, .x = x, .y = y, .rows = rows, .columns = columns, .batch = batch, .kind = kind};
#if defined(__AVX512F__)
    __builtin_cpu_init();
    p.has_vnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
#endif
    return run(picks_part, &p, slices, 1, 1, threads);
}

/* GOMP_parallel of the OpenMP runtime that shall run the threads from now on, or NULL for threads of our own. */
EXPORT void secateur_team(Team given) { __atomic_store_n(&team, given, __ATOMIC_RELAXED); }

/* Counts the changes of these functions' arguments: an object left over from another version is not used. */
EXPORT int secateur_interface(void) { return 7; }

/* The level of x86-64 that this processor has: 1, 3 or 4; 0 elsewhere. */
EXPORT int secateur_level(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    int third = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                __builtin_cpu_supports("bmi2");
    int fourth = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl");
    return third && fourth ? 4 : third ? 3 : 1;
#else
    return 0;
#endif
}
