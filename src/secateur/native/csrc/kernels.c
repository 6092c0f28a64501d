/* Products of a sparse matrix with a few vectors, in plain C: y[b] = W x[b] + bias.

Law: no intrinsics, and no state but whose threads to use; a call writes y and nothing else, and several threads may
call at once. What is read is what the caller has validated: `secateur.kernels` checks every index and pointer before.

Loops over 16 lanes, and the vector types of gcc and clang, become whatever width the machine has. `GCC unroll 1` keeps
gcc from unrolling them into scalars before it looks for vectors; built without loop distribution, accumulators stay in
registers (with it gcc 12 makes a memset of their zeros, and then they stay in memory: twice the time). Single entries
of x are loaded one by one: on the machines measured the processor's gather was slower (docs/notes/kernels.md). */

#include "threads.h"

#include <pthread.h>
#include <stdlib.h>

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
    const void *values;       /* float, or bfloat16 as its 16 bits */
    const float *bias;        /* or NULL */
    const float *x;           /* (batch, columns) */
    float *y;                 /* (batch, rows) */
    size_t rows, columns, batch;
    size_t rows_together, panels; /* CSR: panels of columns, within blocks of that many rows */
    int is_bfloat16;
} Product;

typedef struct {
    const Product *product;
    size_t first_row, end_row, first, end; /* rows (or blocks of rows) and vectors of the batch */
    int failed;
} Part;

/* ------------------------------------------------------------------------------------------------------ entries */

/* Asks for what comes long after `count` values (and their indices, if not NULL). */
INLINE void ask_ahead(const uint16_t *indices, const void *values, size_t at, size_t count, int is_bfloat16) {
    size_t size = is_bfloat16 ? 2 : 4;
    for (size_t line = 0; line < count * size; line += 64) PREFETCH_FAR((uintptr_t)values + at * size + line + FAR);
    if (indices) PREFETCH_FAR((uintptr_t)indices + at * 2 + FAR / size * 2);
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
                 const float *restrict x, int is_bfloat16) {
    float a[LANE], b[LANE];
    LANES a[l] = 0;
    LANES b[l] = 0;
    for (; at + 2 * LANE <= end; at += 2 * LANE) {
        ask_ahead(indices, values, at, 2 * LANE, is_bfloat16);
        LANES a[l] += value_at(values, at + l, is_bfloat16) * x[indices[at + l]];
        LANES b[l] += value_at(values, at + LANE + l, is_bfloat16) * x[indices[at + LANE + l]];
    }
    float sum = 0;
    for (; at < end; at++) sum += value_at(values, at, is_bfloat16) * x[indices[at]];
    for (int l = 0; l < LANE; l++) sum += a[l] + b[l];
    return sum;
}

INLINE void csr_one(const Part *part, int is_bfloat16) {
    const Product *p = part->product;
    for (size_t b = part->first; b < part->end; b++) {
        const float *x = p->x + b * p->columns;
        float *y = p->y + b * p->rows;
        for (size_t top = part->first_row; top < part->end_row; top += p->rows_together) {
            size_t count = part->end_row - top < p->rows_together ? part->end_row - top : p->rows_together;
            const uint32_t *pointer = p->pointers + top * p->panels;
            for (size_t r = top; r < top + count; r++) y[r] = p->bias ? p->bias[r] : 0;
            for (size_t panel = 0; panel < p->panels; panel++)
                for (size_t r = top; r < top + count; r++, pointer++)
                    y[r] += dot(p->indices, p->values, pointer[0], pointer[1], x, is_bfloat16);
        }
    }
}

/* ------------------------------------------------------------------------------------------ CSR, several vectors */

/* One row's entries in one panel, times 16, 32 or 64 vectors: sums (width) += value * x[index] (width). Four
accumulators each, for an addition takes four cycles. */
INLINE void row_16(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int is_bfloat16) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = 0;
    LANES c[l] = 0;
    LANES d[l] = 0;
    for (; at + 4 <= end; at += 4) {
        const float *xa = x + (size_t)indices[at] * 16, *xb = x + (size_t)indices[at + 1] * 16;
        const float *xc = x + (size_t)indices[at + 2] * 16, *xd = x + (size_t)indices[at + 3] * 16;
        ask_ahead(indices, values, at, 4, is_bfloat16);
        float va = value_at(values, at, is_bfloat16), vb = value_at(values, at + 1, is_bfloat16);
        float vc = value_at(values, at + 2, is_bfloat16), vd = value_at(values, at + 3, is_bfloat16);
        LANES a[l] += va * xa[l];
        LANES b[l] += vb * xb[l];
        LANES c[l] += vc * xc[l];
        LANES d[l] += vd * xd[l];
    }
    for (; at < end; at++) {
        const float *xa = x + (size_t)indices[at] * 16;
        float va = value_at(values, at, is_bfloat16);
        LANES a[l] += va * xa[l];
    }
    LANES sums[l] = (a[l] + b[l]) + (c[l] + d[l]);
}

INLINE void row_32(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int is_bfloat16) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = sums[16 + l];
    LANES c[l] = 0;
    LANES d[l] = 0;
    for (; at + 2 <= end; at += 2) {
        const float *xa = x + (size_t)indices[at] * 32, *xc = x + (size_t)indices[at + 1] * 32;
        float va = value_at(values, at, is_bfloat16), vc = value_at(values, at + 1, is_bfloat16);
        LANES a[l] += va * xa[l];
        LANES b[l] += va * xa[16 + l];
        LANES c[l] += vc * xc[l];
        LANES d[l] += vc * xc[16 + l];
    }
    if (at < end) {
        const float *xa = x + (size_t)indices[at] * 32;
        float va = value_at(values, at, is_bfloat16);
        LANES a[l] += va * xa[l];
        LANES b[l] += va * xa[16 + l];
    }
    LANES sums[l] = a[l] + c[l];
    LANES sums[16 + l] = b[l] + d[l];
}

INLINE void row_64(const uint16_t *restrict indices, const void *restrict values, size_t at, size_t end,
                   const float *restrict x, float *restrict sums, int is_bfloat16) {
    float a[LANE], b[LANE], c[LANE], d[LANE];
    LANES a[l] = sums[l];
    LANES b[l] = sums[16 + l];
    LANES c[l] = sums[32 + l];
    LANES d[l] = sums[48 + l];
    for (; at < end; at++) {
        const float *xa = x + (size_t)indices[at] * 64;
        float va = value_at(values, at, is_bfloat16);
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
                     int is_bfloat16) {
    const Product *p = part->product;
    for (size_t top = part->first_row; top < part->end_row; top += p->rows_together) {
        size_t rows = part->end_row - top < p->rows_together ? part->end_row - top : p->rows_together;
        const uint32_t *pointer = p->pointers + top * p->panels;
        for (size_t r = 0; r < rows; r++)
            for (size_t l = 0; l < width; l++) sums[r * width + l] = p->bias ? p->bias[top + r] : 0;
        for (size_t panel = 0; panel < p->panels; panel++)
            for (size_t r = 0; r < rows; r++, pointer++) {
                float *out = sums + r * width;
                if (width == 16) row_16(p->indices, p->values, pointer[0], pointer[1], x, out, is_bfloat16);
                if (width == 32) row_32(p->indices, p->values, pointer[0], pointer[1], x, out, is_bfloat16);
                if (width == 64) row_64(p->indices, p->values, pointer[0], pointer[1], x, out, is_bfloat16);
            }
        for (size_t left = 0; left < rows; left += LANE) {
            size_t right = left + LANE < rows ? left + LANE : rows;
            for (size_t b = 0; b < count; b++)
                for (size_t r = left; r < right; r++) p->y[(first + b) * p->rows + top + r] = sums[r * width + b];
        }
    }
}

INLINE void csr_several(Part *part, int is_bfloat16) {
    const Product *p = part->product;
    float *x = malloc((p->columns + 1) * WIDEST * sizeof(float));
    float *sums = malloc((p->rows_together + 1) * WIDEST * sizeof(float));
    part->failed = !x || !sums;
    for (size_t first = part->first; first < part->end && !part->failed;) {
        size_t left = part->end - first, width = width_for(left), count = left < width ? left : width;
        transpose(p->x + first * p->columns, count, p->columns, width, x);
        if (width == 16) csr_rows(part, first, count, x, sums, 16, is_bfloat16);
        if (width == 32) csr_rows(part, first, count, x, sums, 32, is_bfloat16);
        if (width == 64) csr_rows(part, first, count, x, sums, 64, is_bfloat16);
        first += count;
    }
    free(x);
    free(sums);
}

static void *csr_part(void *argument) {
    Part *part = argument;
    int is_bfloat16 = part->product->is_bfloat16;
    if (part->product->batch == 1) {
        if (is_bfloat16) csr_one(part, 1);
        else csr_one(part, 0);
    } else {
        if (is_bfloat16) csr_several(part, 1);
        else csr_several(part, 0);
    }
    return NULL;
}

/* ------------------------------------------------------------------------- blocks: 16 outputs share their inputs */

INLINE void block_store(const Product *p, size_t b, size_t block, const float *sums) {
    size_t top = block * LANE, count = p->rows - top < LANE ? p->rows - top : LANE;
    float *y = p->y + b * p->rows + top;
    for (size_t l = 0; l < count; l++) y[l] = sums[l] + (p->bias ? p->bias[top + l] : 0);
}

INLINE void block_one(const Part *part, int is_bfloat16) {
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
            ask_ahead(NULL, values, at * LANE, 4 * LANE, is_bfloat16);
            float xa = x[indices[at]], xb = x[indices[at + 1]], xc = x[indices[at + 2]], xd = x[indices[at + 3]];
            LANES a[l] += value_at(values, at * LANE + l, is_bfloat16) * xa;
            LANES b[l] += value_at(values, (at + 1) * LANE + l, is_bfloat16) * xb;
            LANES c[l] += value_at(values, (at + 2) * LANE + l, is_bfloat16) * xc;
            LANES d[l] += value_at(values, (at + 3) * LANE + l, is_bfloat16) * xd;
        }
        for (; at < end; at++) {
            float xa = x[indices[at]];
            LANES a[l] += value_at(values, at * LANE + l, is_bfloat16) * xa;
        }
        LANES a[l] = (a[l] + b[l]) + (c[l] + d[l]);
        block_store(p, 0, block, a);
    }
}

/* 16 outputs times TILE vectors, all sums in registers. Which inputs come next no hardware guesses: asking for those of
the block 16 further on takes a quarter off the time at 256 vectors. */
INLINE void block_tile(const Product *p, size_t at, size_t end, const float *restrict x, float sums[TILE][LANE],
                       int is_bfloat16) {
    const uint16_t *restrict indices = p->indices;
    const void *restrict values = p->values;
    float a[TILE][LANE];
    _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) LANES a[b][l] = 0;
    for (; at < end; at++) {
        const float *xs = x + (size_t)indices[at] * LANE;
        PREFETCH(at + AHEAD < end ? x + (size_t)indices[at + AHEAD] * LANE : xs);
        float w[LANE];
        LANES w[l] = value_at(values, at * LANE + l, is_bfloat16);
        _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) {
            float xb = xs[b];
            LANES a[b][l] += w[l] * xb;
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < TILE; b++) LANES sums[b][l] = a[b][l];
}

/* Blocks whose values stay in the third cache meet all the vectors of a chunk, 16 at a time, before the next ones. Less
than that would read the vectors too often: 512 kB took 1.3 times as long at 256 vectors. */
INLINE void block_several(Part *part, int is_bfloat16) {
    const Product *p = part->product;
    size_t most = part->end - part->first < CHUNK ? part->end - part->first : CHUNK;
    size_t strips = (most + LANE - 1) / LANE, bytes = LANE * (is_bfloat16 ? 2 : 4);
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
                                   sums, is_bfloat16);
                        for (size_t t = 0; t < TILE && b + t < count; t++)
                            block_store(p, first + b + t, each, sums[t]);
                    }
        }
    }
    free(x);
}

static void *block_part(void *argument) {
    Part *part = argument;
    int is_bfloat16 = part->product->is_bfloat16;
    if (part->product->batch == 1) {
        if (is_bfloat16) block_one(part, 1);
        else block_one(part, 0);
    } else {
        if (is_bfloat16) block_several(part, 1);
        else block_several(part, 0);
    }
    return NULL;
}

/* -------------------------------------------------------------------- windows: 16 rows walk through x together */

INLINE Floats floats(const float *from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

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
                         int is_bfloat16) {
    enum { PARTS = LANE / WIDE };
    const int turns = tile > 1 ? 1 : 2; /* an addition takes four cycles, a step of one vector two */
    const size_t bytes = STEPS * LANE * (is_bfloat16 ? 2 : 4);
    Floats a[4][2][PARTS];
    for (int b = 0; b < tile; b++)
        for (int turn = 0; turn < turns; turn++)
            for (int part = 0; part < PARTS; part++) a[b][turn][part] = (Floats){0};
    for (size_t group = p->pointers[slice]; group < p->pointers[slice + 1]; group++) {
        const uint32_t *words = p->words + group * LANE;
        const char *values = (const char *)p->values + group * bytes;
        for (size_t line = 0; line < bytes; line += 64) PREFETCH_FAR((uintptr_t)values + FAR + line);
        PREFETCH_FAR((uintptr_t)words + (uintptr_t)FAR / (is_bfloat16 ? 3 : 6));
        _Pragma("GCC unroll 6") for (int step = 0; step < STEPS; step++) {
            x += p->moves[group * STEPS + (size_t)step];
            for (int part = 0; part < PARTS; part++) {
                Bits number = bits(words + part * WIDE) >> (BITS * step);
                Floats value;
                if (is_bfloat16) { /* two steps share 32 bits */
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
INLINE void windows(const Part *part, int is_bfloat16) {
    const Product *p = part->product;
    for (size_t slice = part->first_row; slice < part->end_row; slice++)
        for (size_t b = part->first, tile; b < part->end; b += tile) {
            float sums[4][LANE];
            const float *x = p->x + b * p->columns;
            tile = part->end - b >= 4 ? 4 : part->end - b >= 2 ? 2 : 1;
            if (tile == 4) window_slice(p, slice, x, sums, 4, is_bfloat16);
            if (tile == 2) window_slice(p, slice, x, sums, 2, is_bfloat16);
            if (tile == 1) window_slice(p, slice, x, sums, 1, is_bfloat16);
            for (size_t t = 0; t < tile; t++)
                for (size_t l = 0; l < LANE; l++) {
                    int32_t row = p->order[slice * LANE + l];
                    if (row >= 0) p->y[(b + t) * p->rows + (size_t)row] = sums[t][l] + (p->bias ? p->bias[row] : 0);
                }
        }
}

static void *window_part(void *argument) {
    Part *part = argument;
    if (part->product->is_bfloat16) windows(part, 1);
    else windows(part, 0);
    return NULL;
}

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
EXPORT int secateur_csr(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *bias,
                        const float *x, float *y, size_t rows, size_t columns, size_t batch, size_t rows_together,
                        size_t panels, int is_bfloat16, size_t threads) {
    Product p = {.indices = indices, .pointers = pointers, .values = values, .bias = bias, .x = x, .y = y, .rows = rows,
                 .columns = columns, .batch = batch, .rows_together = rows_together, .panels = panels,
                 .is_bfloat16 = is_bfloat16};
    return run(csr_part, &p, rows, panels > 1 ? rows_together : 1, panels, threads);
}

EXPORT int secateur_block(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *bias,
                          const float *x, float *y, size_t rows, size_t columns, size_t batch, int is_bfloat16,
                          size_t threads) {
    Product p = {.indices = indices, .pointers = pointers, .values = values, .bias = bias, .x = x, .y = y, .rows = rows,
                 .columns = columns, .batch = batch, .is_bfloat16 = is_bfloat16};
    return run(block_part, &p, (rows + LANE - 1) / LANE, 1, 1, threads);
}

/* x has at least 32 columns; within a slice the moves add up to no more than columns - 32. */
EXPORT int secateur_window(const uint32_t *words, const uint32_t *pointers, const void *values, const float *bias,
                           const uint8_t *moves, const int32_t *order, const float *x, float *y, size_t rows,
                           size_t columns, size_t batch, size_t slices, int is_bfloat16, size_t threads) {
    Product p = {.words = words, .moves = moves, .order = order, .pointers = pointers, .values = values, .bias = bias,
                 .x = x, .y = y, .rows = rows, .columns = columns, .batch = batch, .is_bfloat16 = is_bfloat16};
    return run(window_part, &p, slices, 1, 1, threads);
}

/* GOMP_parallel of the OpenMP runtime that shall run the threads from now on, or NULL for threads of our own. */
EXPORT void secateur_team(Team given) { __atomic_store_n(&team, given, __ATOMIC_RELAXED); }

/* Counts the changes of these functions' arguments: an object left over from another version is not used. */
EXPORT int secateur_interface(void) { return 4; }

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
