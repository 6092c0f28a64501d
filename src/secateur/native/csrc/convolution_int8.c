/* Convolutions with a sparse weight in int8 whose inputs are rounded to 8 bits as they come, each image by itself.

Law: as in convolution.c; and the sums are exact, so that they are the same whatever the threads and the processor.

An image is rounded once, to codes of one byte; from them the inputs of a block of channels are copied for each tile of
the output as convolution.c does, where padding has the code of 0. Kept weights of an output are multiplied four at a
time, a *quad*: 32 places of each of its four inputs are two loads into halves of a vector, and two permutations of bytes
put the four inputs of a place side by side, which is what VNNI multiplies and adds. Other processors multiply in 16 bits
and add in 32. */

#include "activations.h"
#include "rounding.h"
#include "planes.h"
#include "threads.h"

#include <stdlib.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

enum { UNIT = 32, MOST_UNITS = 12, LINE = 64 }; /* places that are computed together; bytes of a line of the cache */

typedef struct {
    const uint16_t *indices;  /* the column of each kept weight in its group's part of the flattened weight */
    const uint32_t *pointers; /* where the entries of each row begin in each block of channels, multiples of 4; the end */
    const int8_t *values;
    const float *scales, *bias, *addend, *x; /* bias and addend: or NULL */
    float *y;
    size_t images, channels, height, width, rows, out_height, out_width;
    size_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left;
    size_t groups, together;
    int activation, is_plain; /* is_plain: not to use what only some processors have */
} Convolution;

/* How all tiles of a convolution are computed; see convolution.c. */
typedef struct {
    const Convolution *c;
    Planes copies;
    size_t blocks, places, tiles, units, size; /* size: places of a tile, of so many units */
    size_t in_image; /* numbers of an image */
    int is_direct, has_vnni;
} Plan;

/* Some outputs at one tile, over one block of channels. */
typedef struct {
    const Convolution *c;
    const uint32_t *pointers;
    const int32_t *table, *sums; /* sums: of each output's weights, or NULL where the code of 0 is 0 */
    const uint8_t *x;            /* where the tile begins */
    const float *addend;
    float *y; /* of this image */
    int32_t *partial;
    Rounded rounded;
    size_t first_row, end_row, places, start, count;
    int units, is_first, is_last;
} Block;

typedef struct {
    const Plan *plan;
    uint8_t *codes;
    size_t image;
    Rounded rounded;
} Image;

typedef struct {
    const Plan *plan;
    Image *image;
    size_t first, end, first_row, end_row; /* numbers, tiles or images; outputs */
    Extremes found;
    int failed;
} Part;

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t over(size_t a, size_t b) { return (a + b - 1) / b; }

/* ------------------------------------------------------------------------------------------------------ the sums */

/* What becomes of an output's sums at a unit of places. */
INLINE void unit_stored(const Block *b, size_t o, size_t unit, const int32_t sums[UNIT]) {
    const Convolution *c = b->c;
    const float scale = b->rounded.scale * c->scales[o], bias = c->bias ? c->bias[o] : 0;
    const size_t first = unit * UNIT, place = o * b->places + b->start + first;
    float made[UNIT];
    if (first >= b->count) return;
    const size_t count = least(UNIT, b->count - first);
    for (int l = 0; l < UNIT; l++) made[l] = (float)sums[l] * scale + bias;
    if (b->addend)
        for (size_t l = 0; l < count; l++) made[l] += b->addend[place + l];
    if (c->activation == RELU)
        for (int l = 0; l < UNIT; l++) made[l] = made[l] < 0 ? 0 : made[l];
    else activated(c->activation, made, count);
    memcpy(b->y + place, made, count * sizeof(float));
}

/* Any processor: a product of a code and a weight has 16 bits. */
static void outputs_plain(const Block *b) {
    const Convolution *c = b->c;
    for (size_t o = b->first_row; o < b->end_row; o++) {
        int32_t *partial = b->partial + (o - b->first_row) * (size_t)b->units * UNIT;
        const int32_t begin = b->sums ? (int32_t)(0 - (uint32_t)b->rounded.zero * (uint32_t)b->sums[o]) : 0;
        for (int u = 0; u < b->units; u++) {
            int32_t a[UNIT];
            for (int l = 0; l < UNIT; l++) a[l] = b->is_first ? begin : partial[u * UNIT + l];
            for (size_t at = b->pointers[o], end = b->pointers[o + 1]; at < end; at++) {
                const uint8_t *restrict x = b->x + b->table[c->indices[at]] + u * UNIT;
                const int16_t value = c->values[at];
                for (int l = 0; l < UNIT; l++) a[l] += (int16_t)(value * (int16_t)x[l]);
            }
            if (b->is_last) unit_stored(b, o, (size_t)u, a);
            else memcpy(partial + u * UNIT, a, sizeof a);
        }
    }
}

#if defined(__AVX512F__)
#define ON __attribute__((target("avx512vnni,avx512vbmi")))

/* 16 bytes of each half of two vectors, side by side. */
ON INLINE __m512i of_four(int second) {
    uint8_t number[64];
    for (int p = 0; p < 16; p++)
        for (int n = 0; n < 4; n++) number[4 * p + n] = (uint8_t)(32 * n + p + 16 * second);
    return _mm512_loadu_si512(number);
}

/* 32 bytes from each of two places. */
ON INLINE __m512i both(const uint8_t *a, const uint8_t *b) {
    const __m512i lower = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
    return _mm512_inserti64x4(lower, _mm256_loadu_si256((const __m256i *)b), 1);
}

ON INLINE void outputs_of(const Block *b, const int units) {
    const Convolution *c = b->c;
    const int32_t *restrict table = b->table;
    const __m512i first = of_four(0), second = of_four(1);
    for (size_t o = b->first_row; o < b->end_row; o++) {
        __m512i a[2 * MOST_UNITS];
        int32_t *partial = b->partial + (o - b->first_row) * (size_t)units * UNIT;
        if (b->is_first) {
            const uint32_t begin = b->sums ? 0 - (uint32_t)b->rounded.zero * (uint32_t)b->sums[o] : 0;
            _Pragma("GCC unroll 32") for (int t = 0; t < 2 * units; t++) a[t] = _mm512_set1_epi32((int32_t)begin);
        } else {
            _Pragma("GCC unroll 32") for (int t = 0; t < 2 * units; t++) a[t] = _mm512_loadu_si512(partial + 16 * t);
        }
        for (size_t at = b->pointers[o], end = b->pointers[o + 1]; at < end; at += 4) {
            const uint16_t *i = c->indices + at;
            const uint8_t *x0 = b->x + table[i[0]], *x1 = b->x + table[i[1]];
            const uint8_t *x2 = b->x + table[i[2]], *x3 = b->x + table[i[3]];
            int32_t four;
            memcpy(&four, c->values + at, sizeof four);
            const __m512i weights = _mm512_set1_epi32(four);
            _Pragma("GCC unroll 16") for (int u = 0; u < units; u++) {
                const __m512i lower = both(x0 + UNIT * u, x1 + UNIT * u), upper = both(x2 + UNIT * u, x3 + UNIT * u);
                a[2 * u] = _mm512_dpbusd_epi32(a[2 * u], _mm512_permutex2var_epi8(lower, first, upper), weights);
                a[2 * u + 1] =
                    _mm512_dpbusd_epi32(a[2 * u + 1], _mm512_permutex2var_epi8(lower, second, upper), weights);
            }
        }
        if (!b->is_last) {
            _Pragma("GCC unroll 32") for (int t = 0; t < 2 * units; t++) _mm512_storeu_si512(partial + 16 * t, a[t]);
            continue;
        }
        const __m512 scale = _mm512_set1_ps(b->rounded.scale * c->scales[o]);
        const __m512 bias = _mm512_set1_ps(c->bias ? c->bias[o] : 0);
        const size_t place = o * b->places + b->start;
        _Pragma("GCC unroll 32") for (int t = 0; t < 2 * units; t++) {
            if ((size_t)t * 16 >= b->count) break;
            const size_t left = b->count - (size_t)t * 16, at = place + (size_t)t * 16;
            const __mmask16 there = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
            __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[t]), scale, bias);
            if (b->addend) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, b->addend + at));
            if (c->activation == RELU) /* what is no number stays so */
                y = _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps());
            _mm512_mask_storeu_ps(b->y + at, there, y);
        }
        if (c->activation > RELU) activated(c->activation, b->y + place, b->count);
    }
}

#define UP_TO_12(EACH) EACH(1) EACH(2) EACH(3) EACH(4) EACH(5) EACH(6) EACH(7) EACH(8) EACH(9) EACH(10) EACH(11) EACH(12)
#define OF_UNITS(N)                                                                                                    \
    ON static void outputs_##N(const Block *b) { outputs_of(b, N); }
UP_TO_12(OF_UNITS)
#define NAMED(N) outputs_##N,
static void (*const OUTPUTS[MOST_UNITS])(const Block *) = {UP_TO_12(NAMED)};
#endif

static int has_vnni(void) {
#if defined(__AVX512F__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
#else
    return 0;
#endif
}

static void outputs(const Block *b, int vnni) {
#if defined(__AVX512F__)
    if (vnni) {
        OUTPUTS[b->units - 1](b);
        return;
    }
#endif
    (void)vnni;
    outputs_plain(b);
}

/* ------------------------------------------------------------------------------------------------------ the plan */

/* As many units as leave the fewest places of the last tile empty, where what a quad costs by itself is about that of
one unit. */
static size_t units_for(size_t places) {
    size_t units = over(places, UNIT), best = 1, best_cost = SIZE_MAX;
    for (size_t tile = 1; tile <= MOST_UNITS; tile++) {
        size_t cost = over(units, tile) * (tile + 1);
        if (cost <= best_cost) best = tile, best_cost = cost;
    }
    return best;
}

static int plan_for(Plan *p, const Convolution *c) {
    const size_t columns = c->channels / c->groups * c->kernel_height * c->kernel_width;
    *p = (Plan){.c = c, .places = c->out_height * c->out_width, .blocks = over(c->channels / c->groups, c->together),
                .in_image = c->channels * c->height * c->width};
    p->units = units_for(p->places);
    p->size = p->units * UNIT;
    p->tiles = over(p->places, p->size);
    p->is_direct = c->kernel_height == 1 && c->kernel_width == 1 && c->stride_y == 1 && c->stride_x == 1 && !c->top &&
                   !c->left && c->out_height == c->height && c->out_width == c->width;
    p->has_vnni = !c->is_plain && has_vnni();
    return planes_for(&p->copies, &(Geometry){.kernel_height = c->kernel_height, .kernel_width = c->kernel_width,
                      .stride_y = c->stride_y, .dilation_y = c->dilation_y, .columns = columns, .together = c->together,
                      .size = p->size, .pitch = c->out_width, .line = LINE, .uncopied = p->is_direct ? p->places : 0});
}

/* ------------------------------------------------------------------------------------------------------ the copy */

/* What one column of the kernel meets in one channel, as in convolution.c; `fill` is the code of 0. */
typedef struct {
    const uint8_t *image;
    ptrdiff_t height, width, across, stride_y, stride_x, top, shift, low, high;
    int fill;
} View;

INLINE void filled(uint8_t *out, ptrdiff_t count, int fill) {
    if (count > 0) memset(out, fill, (size_t)count);
}

/* Where output and image are as wide: one run of the image, whose ends and edges are then overwritten. */
static void copy_run(const View *v, ptrdiff_t start, ptrdiff_t count, uint8_t *restrict out) {
    ptrdiff_t from = start + v->top * v->width + v->shift, low = from < 0 ? -from : 0, high = v->height * v->width - from;
    if (low > count) low = count;
    if (high > count) high = count;
    if (high < low) high = low;
    filled(out, low, v->fill);
    if (high > low) memcpy(out + low, v->image + from + low, (size_t)(high - low));
    filled(out + high, count - high, v->fill);
    for (ptrdiff_t j = 0; j < v->across; j++) {
        if (j == v->low) j = v->high;
        if (j == v->across) return;
        ptrdiff_t p = j - start % v->across;
        for (p = p < 0 ? p + v->across : p; p < count; p += v->across) out[p] = (uint8_t)v->fill;
    }
}

typedef uint16_t Pairs __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint8_t Codes __attribute__((vector_size(16), aligned(1), may_alias));

/* `count` bytes, every second from `from` on. Up to 32 more are read, which the codes of an image have after them, and
up to 15 more written, which the next rows are written over; after the last the copy has a line. */
static void every_second(const uint8_t *restrict from, ptrdiff_t count, uint8_t *restrict to) {
    for (ptrdiff_t j = 0; j < count; j += 16) {
        Pairs pairs = *(const Pairs *)(from + 2 * j);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        pairs >>= 8;
#endif
        *(Codes *)(to + j) = __builtin_convertvector(pairs & 255, Codes);
    }
}

/* For any width and stride, row by row. */
static void copy_rows(const View *v, ptrdiff_t start, ptrdiff_t count, uint8_t *restrict out) {
    ptrdiff_t row = start / v->across, column = start % v->across;
    for (ptrdiff_t done = 0, end; done < count; done += end - column, row++, column = 0) {
        const ptrdiff_t from = row * v->stride_y + v->top;
        uint8_t *to = out + done - column; /* column 0, be it there or not */
        end = v->across - column < count - done ? v->across : column + count - done;
        ptrdiff_t low = v->low > column ? v->low : column, high = v->high < end ? v->high : end;
        if (low > end) low = end;
        if (from < 0 || from >= v->height) high = low = end;
        if (high < low) high = low;
        if (high > low) {
            const uint8_t *line = v->image + from * v->width + v->shift + low * v->stride_x;
            if (v->stride_x == 1) memcpy(to + low, line, (size_t)(high - low));
            else if (v->stride_x == 2) every_second(line, high - low, to + low);
            else
                for (ptrdiff_t j = low; j < high; j++) to[j] = line[(j - low) * v->stride_x];
        }
        for (ptrdiff_t j = column; j < low; j++) to[j] = (uint8_t)v->fill; /* few: no call */
        for (ptrdiff_t j = high; j < end; j++) to[j] = (uint8_t)v->fill;
    }
}

/* The codes of a block of channels for the tile that begins at place `start`. */
static void copy_block(const Plan *p, const uint8_t *image, size_t channels, size_t start, int fill, uint8_t *out) {
    const Convolution *c = p->c;
    const ptrdiff_t count = (ptrdiff_t)(p->size + p->copies.below * c->out_width), stride = (ptrdiff_t)c->stride_x;
    View v = {.image = image, .height = (ptrdiff_t)c->height, .width = (ptrdiff_t)c->width, .fill = fill,
              .across = (ptrdiff_t)c->out_width, .stride_y = (ptrdiff_t)c->stride_y, .stride_x = stride};
    const int is_run = c->stride_x == 1 && c->stride_y == 1 && c->width == c->out_width;
    for (size_t channel = 0; channel < channels; channel++, v.image += v.height * v.width)
        for (size_t kx = 0; kx < c->kernel_width; kx++) {
            v.shift = (ptrdiff_t)(kx * c->dilation_x) - (ptrdiff_t)c->left;
            v.low = v.shift < 0 ? (stride - 1 - v.shift) / stride : 0;
            v.high = v.width > v.shift ? (v.width - v.shift + stride - 1) / stride : 0;
            if (v.low > v.across) v.low = v.across;
            if (v.high > v.across) v.high = v.across;
            if (v.high < v.low) v.high = v.low;
            for (size_t plane = 0; plane < p->copies.planes; plane++, out += p->copies.per_channel) {
                v.top = (ptrdiff_t)p->copies.top[plane] - (ptrdiff_t)c->top;
                if (is_run) copy_run(&v, (ptrdiff_t)start, count, out);
                else copy_rows(&v, (ptrdiff_t)start, count, out);
            }
        }
}

/* ----------------------------------------------------------------------------------------------------- the tiles */

/* Of each output, the sum of its weights: what the code of 0 has added to it. */
static int32_t *weight_sums(const Convolution *c, size_t blocks, size_t first, size_t end) {
    int32_t *sums = calloc(c->rows + 1, sizeof *sums);
    for (size_t block = 0; block < blocks && sums; block++)
        for (size_t o = first; o < end; o++) {
            const uint32_t *pointer = c->pointers + block * c->rows + o;
            int32_t sum = 0;
            for (size_t at = pointer[0]; at < pointer[1]; at++) sum += c->values[at];
            sums[o] += sum;
        }
    return sums;
}

/* Some tiles of an image, for some outputs. */
static int tiles_made(const Image *image, size_t first, size_t end, size_t first_row, size_t end_row) {
    const Plan *p = image->plan;
    const Convolution *c = p->c;
    const size_t group_channels = c->channels / c->groups, group_rows = c->rows / c->groups;
    const size_t copied = p->is_direct ? 0 : c->together * c->kernel_width * p->copies.planes * p->copies.per_channel + LINE;
    const size_t of_image = image->image * c->rows * p->places;
    const int has_zero = image->rounded.zero != 0;
    uint8_t *memory = malloc(copied + group_rows * p->size * sizeof(int32_t) + 2 * LINE);
    int32_t *sums = has_zero ? weight_sums(c, p->blocks, first_row, end_row) : NULL;
    if (!memory || (has_zero && !sums)) {
        free(memory);
        free(sums);
        return 1;
    }
    uint8_t *copy = (uint8_t *)(((uintptr_t)memory + LINE - 1) & ~(uintptr_t)(LINE - 1));
    Block b = {.c = c, .table = p->copies.table, .sums = sums, .y = c->y + of_image, .partial = (int32_t *)(copy + copied),
               .addend = c->addend ? c->addend + of_image : NULL, .rounded = image->rounded, .places = p->places,
               .units = (int)p->units};
    for (size_t n = first; n < end; n++) {
        b.start = n * p->size;
        b.count = least(p->size, p->places - b.start);
        for (size_t group = 0; group < c->groups; group++) {
            b.first_row = group * group_rows > first_row ? group * group_rows : first_row;
            b.end_row = least((group + 1) * group_rows, end_row);
            for (size_t block = 0; block < p->blocks && b.first_row < b.end_row; block++) {
                const size_t channel = block * c->together;
                const uint8_t *codes = image->codes + (group * group_channels + channel) * c->height * c->width;
                if (!p->is_direct)
                    copy_block(p, codes, least(c->together, group_channels - channel), b.start, image->rounded.zero, copy);
                b.x = p->is_direct ? codes + b.start : copy;
                b.pointers = c->pointers + block * c->rows;
                b.is_first = block == 0;
                b.is_last = block + 1 == p->blocks;
                outputs(&b, p->has_vnni);
            }
        }
    }
    free(memory);
    free(sums);
    return 0;
}

/* A tile of places is read whole, if only its first is there. */
static uint8_t *codes_for(const Plan *p) {
    uint8_t *codes = malloc(p->in_image + p->size + LINE);
    if (codes) memset(codes + p->in_image, 0, p->size + LINE);
    return codes;
}

/* Images that one thread computes alone. */
static void *images_part(void *argument) {
    Part *part = argument;
    const Plan *p = part->plan;
    Image image = {.plan = p, .codes = codes_for(p)};
    part->failed = !image.codes;
    for (image.image = part->first; image.image < part->end && !part->failed; image.image++) {
        const float *x = p->c->x + image.image * p->in_image;
        image.rounded = rounded_for(extremes(x, p->in_image));
        to_codes(x, p->in_image, image.rounded, image.codes);
        part->failed = tiles_made(&image, 0, p->tiles, 0, p->c->rows);
    }
    free(image.codes);
    return NULL;
}

static void *extremes_part(void *argument) {
    Part *part = argument;
    const float *x = part->plan->c->x + part->image->image * part->plan->in_image;
    part->found = extremes(x + part->first, part->end - part->first);
    return NULL;
}

static void *codes_part(void *argument) {
    Part *part = argument;
    const float *x = part->plan->c->x + part->image->image * part->plan->in_image;
    to_codes(x + part->first, part->end - part->first, part->image->rounded, part->image->codes + part->first);
    return NULL;
}

static void *tiles_part(void *argument) {
    Part *part = argument;
    part->failed = tiles_made(part->image, part->first, part->end, part->first_row, part->end_row);
    return NULL;
}

/* One image by all threads: its extremes, its codes, and then its tiles, or where there are too few of them outputs. */
static int image_made(const Plan *p, size_t number, size_t threads, uint8_t *codes) {
    Part parts[MOST_THREADS];
    Image image = {.plan = p, .codes = codes, .image = number};
    const size_t rows = p->c->rows;
    for (size_t n = 0; n < threads; n++)
        parts[n] = (Part){.plan = p, .image = &image, .first = p->in_image * n / threads, .end = p->in_image * (n + 1) / threads};
    secateur_in_threads(extremes_part, parts, sizeof *parts, threads);
    Extremes all = {0, 0, 0};
    for (size_t n = 0; n < threads; n++) {
        if (parts[n].found.low < all.low) all.low = parts[n].found.low;
        if (parts[n].found.high > all.high) all.high = parts[n].found.high;
        all.odd |= parts[n].found.odd;
    }
    image.rounded = rounded_for(all);
    secateur_in_threads(codes_part, parts, sizeof *parts, threads);
    const size_t across = p->tiles % threads == 0 || p->tiles >= 4 * threads ? 1 : least(threads, rows);
    const size_t along = across > 1 ? 1 : least(threads, p->tiles);
    size_t count = 0;
    for (size_t n = 0; n < along; n++)
        for (size_t r = 0; r < across; r++)
            parts[count++] = (Part){.plan = p, .image = &image, .first = p->tiles * n / along, .end = p->tiles * (n + 1) / along,
                                    .first_row = rows * r / across, .end_row = rows * (r + 1) / across};
    secateur_in_threads(tiles_part, parts, sizeof *parts, count);
    int failed = 0;
    for (size_t n = 0; n < count; n++) failed |= parts[n].failed;
    return failed;
}

/* As many images as there are threads for are computed side by side, the rest by all threads together. */
static int convolved(const Convolution *c, size_t threads) {
    Part parts[MOST_THREADS];
    Plan plan;
    int failed = plan_for(&plan, c);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    const size_t each = c->images / threads, alone = each * threads;
    if (!failed && alone) {
        for (size_t n = 0; n < threads; n++) parts[n] = (Part){.plan = &plan, .first = each * n, .end = each * (n + 1)};
        secateur_in_threads(images_part, parts, sizeof *parts, threads);
        for (size_t n = 0; n < threads; n++) failed |= parts[n].failed;
    }
    if (!failed && alone < c->images) {
        uint8_t *codes = codes_for(&plan);
        failed = !codes;
        for (size_t n = alone; n < c->images && !failed; n++) failed = image_made(&plan, n, threads, codes);
        free(codes);
    }
    planes_freed(&plan.copies);
    return failed;
}

/* Returns 0, or 1 where memory could not be had. Arguments as those of secateur_convolution; values are int8, four kept
weights side by side, and pointers multiples of 4. A `wide` that is not 0 asks for the loops that any processor has. */
EXPORT int secateur_convolution_int8(const uint16_t *indices, const uint32_t *pointers, const void *values,
                                     const float *scales, const float *bias, const float *addend, const float *x, float *y,
                                     const size_t *sizes, size_t x_plane, size_t y_plane, size_t addend_plane, int kind,
                                     size_t threads) {
    (void)kind, (void)x_plane, (void)y_plane, (void)addend_plane; /* planes lie side by side here */
    Convolution c = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .addend = addend, .x = x,
                     .y = y, .images = sizes[0], .channels = sizes[1], .height = sizes[2], .width = sizes[3],
                     .rows = sizes[4], .out_height = sizes[5], .out_width = sizes[6], .kernel_height = sizes[7],
                     .kernel_width = sizes[8], .stride_y = sizes[9], .stride_x = sizes[10], .dilation_y = sizes[11],
                     .dilation_x = sizes[12], .top = sizes[13], .left = sizes[14], .groups = sizes[15],
                     .together = sizes[16], .activation = (int)sizes[17], .is_plain = sizes[18] != 0};
    return convolved(&c, threads);
}

/* ----------------------------------------------------------------------------------- products with many vectors */

/* y[b] = W x[b] + bias: the same with vectors for places, each of which is rounded by itself. Entries as in kernels.c's
CSR, by fours. */
typedef struct {
    Convolution c; /* of which the entries, scales, bias, x, y and rows */
    const int32_t *table;
    size_t columns, batch, rows_together, panels, size;
    int vnni;
} Vectors;

typedef struct {
    const Vectors *v;
    size_t first, end, first_row, end_row;
    int failed;
} Share;

/* What becomes of the sums (rows, size) of some rows: 16 at a time, and then turned. */
static void vectors_stored(const Vectors *v, size_t top, size_t rows, size_t first, size_t count, const int32_t *sums,
                           const int32_t *of_weights, const Rounded *rounded) {
    float made[16][UNIT];
    for (size_t left = 0; left < rows; left += 16)
        for (size_t strip = 0; strip < count; strip += UNIT) {
            const size_t some = least(16, rows - left), vectors = least(UNIT, count - strip);
            for (size_t r = 0; r < some; r++) {
                const size_t row = top + left + r;
                const uint32_t of_row = (uint32_t)of_weights[left + r];
                const int32_t *sum = sums + (left + r) * v->size + strip;
                const float scale = v->c.scales[row], bias = v->c.bias ? v->c.bias[row] : 0;
                for (size_t n = 0; n < vectors; n++) {
                    const Rounded *how = rounded + strip + n;
                    const int32_t whole = (int32_t)((uint32_t)sum[n] - (uint32_t)how->zero * of_row);
                    made[r][n] = (float)whole * (how->scale * scale) + bias;
                }
            }
            for (size_t n = 0; n < vectors; n++) {
                float *y = v->c.y + (first + strip + n) * v->c.rows + top + left;
                for (size_t r = 0; r < some; r++) y[r] = made[r][n];
            }
        }
}

/* The codes (columns, size) of some vectors; `rows` has room for 16. */
static void vectors_rounded(const Vectors *v, size_t first, size_t count, Rounded *rounded, uint8_t *rows, uint8_t *codes) {
    for (size_t strip = 0; strip < count; strip += 16) {
        const size_t some = least(16, count - strip);
        memset(rows, 0, 16 * v->columns);
        for (size_t n = 0; n < some; n++) {
            const float *x = v->c.x + (first + strip + n) * v->columns;
            rounded[strip + n] = rounded_for(extremes(x, v->columns));
            to_codes(x, v->columns, rounded[strip + n], rows + n * v->columns);
        }
        for (size_t column = 0; column < v->columns; column++)
            for (size_t n = 0; n < 16; n++) codes[column * v->size + strip + n] = rows[n * v->columns + column];
    }
}

static void *vectors_part(void *argument) {
    Share *share = argument;
    const Vectors *v = share->v;
    uint8_t *codes = calloc(v->columns + 1, v->size), *rows = malloc(16 * (v->columns + 1));
    Rounded *rounded = malloc(v->size * sizeof *rounded);
    int32_t *sums = malloc((v->rows_together + 1) * (v->size + 1) * sizeof *sums);
    share->failed = !codes || !rows || !rounded || !sums;
    for (size_t first = share->first; first < share->end && !share->failed; first += v->size) {
        const size_t count = least(v->size, share->end - first);
        vectors_rounded(v, first, count, rounded, rows, codes);
        for (size_t top = share->first_row; top < share->end_row; top += v->rows_together) {
            int32_t *of_weights = sums + v->rows_together * v->size;
            Block b = {.c = &v->c, .pointers = v->c.pointers + top * v->panels, .table = v->table, .x = codes, .partial = sums,
                       .units = (int)(v->size / UNIT), .end_row = least(v->rows_together, share->end_row - top)};
            memset(of_weights, 0, v->rows_together * sizeof *of_weights);
            for (size_t panel = 0; panel < v->panels; panel++, b.pointers += b.end_row) {
                b.is_first = panel == 0;
                outputs(&b, v->vnni);
                for (size_t r = 0; r < b.end_row; r++)
                    for (size_t at = b.pointers[r]; at < b.pointers[r + 1]; at++) of_weights[r] += v->c.values[at];
            }
            vectors_stored(v, top, b.end_row, first, count, sums, of_weights, rounded);
        }
    }
    free(codes);
    free(rows);
    free(rounded);
    free(sums);
    return NULL;
}

/* Returns 0, or 1 where memory could not be had. Arguments as those of secateur_csr; values are int8, by fours. */
EXPORT int secateur_csr_int8(const uint16_t *indices, const uint32_t *pointers, const void *values, const float *scales,
                             const float *bias, const float *x, float *y, size_t rows, size_t columns, size_t batch,
                             size_t rows_together, size_t panels, int kind, size_t threads) {
    Share shares[MOST_THREADS];
    size_t count = 0;
    (void)kind;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    const int by_vectors = batch >= threads * LINE;
    const size_t all = by_vectors ? over(batch, UNIT) : over(rows, rows_together); /* in units or blocks of rows */
    const size_t most = by_vectors ? over(all, threads) * UNIT : batch;
    Vectors v = {.c = {.indices = indices, .pointers = pointers, .values = values, .scales = scales, .bias = bias, .x = x, .y = y,
                       .rows = rows},
                 .columns = columns, .batch = batch, .rows_together = rows_together, .panels = panels,
                 .size = units_for(most) * UNIT, .vnni = has_vnni()};
    if (columns > INT32_MAX / v.size) return 1;
    int32_t *table = malloc((columns + 1) * sizeof *table);
    if (!table) return 1;
    for (size_t column = 0; column < columns; column++) table[column] = (int32_t)(column * v.size);
    v.table = table;
    for (size_t n = 0; n < threads; n++) {
        const size_t from = all * n / threads, to = all * (n + 1) / threads;
        if (from == to) continue;
        shares[count++] = by_vectors ? (Share){&v, from * UNIT, least(to * UNIT, batch), 0, rows, 0}
                                     : (Share){&v, 0, batch, from * rows_together, least(to * rows_together, rows), 0};
    }
    secateur_in_threads(vectors_part, shares, sizeof *shares, count);
    int failed = 0;
    for (size_t n = 0; n < count; n++) failed |= shares[n].failed;
    free(table);
    return failed;
}
