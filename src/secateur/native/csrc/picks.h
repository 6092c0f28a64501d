/* Windows of int8 values times inputs that are rounded to 8 bits: what 16 rows pick in four steps is multiplied at once.
Included by kernels.c.

Of a group the first 64 values are four of each lane, those of its steps 0 to 3, and the last 32 two of each, those of
steps 4 and 5. A lane that takes nothing in a step has the value 0 there. */

enum { OF_GROUP = STEPS * LANE, OF_FOUR = 4 * LANE };

/* The sums of a slice's 16 rows for some vectors, and of their weights. Any processor. */
static void picks_plain(const Product *p, size_t slice, const uint8_t *x, uint32_t sums[][LANE],
                        uint32_t of_weights[LANE], int tile) {
    memset(sums, 0, (size_t)tile * sizeof *sums);
    memset(of_weights, 0, LANE * sizeof *of_weights);
    for (size_t group = p->pointers[slice]; group < p->pointers[slice + 1]; group++)
        for (size_t step = 0; step < STEPS; step++) {
            const uint32_t *words = p->words + group * LANE;
            const int8_t *values = (const int8_t *)p->values + group * OF_GROUP;
            x += p->moves[group * STEPS + step];
            for (size_t l = 0; l < LANE; l++) {
                const int32_t value = step < 4 ? values[4 * l + step] : values[OF_FOUR + 2 * l + step - 4];
                const uint8_t *input = x + (words[l] >> (BITS * step)) % WINDOW;
                of_weights[l] += (uint32_t)value;
                for (int b = 0; b < tile; b++) sums[b][l] += (uint32_t)(value * input[(size_t)b * p->columns]);
            }
        }
}

#if defined(__AVX512F__)
#define WITH_VBMI __attribute__((target("avx512vnni,avx512vbmi")))

/* 32 bytes from each of two places. */
WITH_VBMI INLINE __m512i two_windows(const uint8_t *a, const uint8_t *b) {
    const __m512i lower = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
    return _mm512_inserti64x4(lower, _mm256_loadu_si256((const __m256i *)b), 1);
}

/* One instruction takes the numbers of 5 bits out of the words, one adds where each step's window lies in a register, and
one picks the inputs of four steps for 16 lanes. */
WITH_VBMI INLINE void picks_of(const Product *p, size_t slice, const uint8_t *x, uint32_t sums[][LANE],
                               uint32_t of_weights[LANE], const int tile) {
    const __m512i fields = _mm512_set1_epi64(0x2f2a25200f0a0500), last_fields = _mm512_set1_epi64(0x0000393400001914);
    const __m512i windows = _mm512_set1_epi32(0x60402000), last_windows = _mm512_set1_epi32(0x00002000);
    const __m512i five = _mm512_set1_epi8(31), ones = _mm512_set1_epi8(1);
    __m512i a[4], b[4], w = _mm512_setzero_si512(), last_w = w; /* two of each, for an addition takes four cycles */
    for (int t = 0; t < tile; t++) a[t] = b[t] = w;
    for (size_t group = p->pointers[slice]; group < p->pointers[slice + 1]; group++) {
        const __m512i words = _mm512_loadu_si512(p->words + group * LANE);
        const int8_t *values = (const int8_t *)p->values + group * OF_GROUP;
        const uint8_t *moves = p->moves + group * STEPS;
        PREFETCH_FAR((uintptr_t)values + FAR);
        PREFETCH_FAR((uintptr_t)values + FAR + 64);
        PREFETCH_FAR((uintptr_t)(p->words + group * LANE) + FAR * 2 / 3);
        /* (number & 31) | window */
        const __m512i at = _mm512_ternarylogic_epi64(_mm512_multishift_epi64_epi8(fields, words), five, windows, 0xea);
        const __m512i last_at = _mm512_ternarylogic_epi64(_mm512_multishift_epi64_epi8(last_fields, words), five, last_windows, 0xea);
        const __m512i four = _mm512_loadu_si512(values);
        const __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(values + OF_FOUR)));
        const uint8_t *x0 = x + moves[0], *x1 = x0 + moves[1], *x2 = x1 + moves[2], *x3 = x2 + moves[3];
        const uint8_t *x4 = x3 + moves[4];
        x = x4 + moves[5];
        for (int t = 0; t < tile; t++) {
            const size_t along = (size_t)t * p->columns;
            const __m512i first = two_windows(x0 + along, x1 + along), second = two_windows(x2 + along, x3 + along);
            const __m512i last = two_windows(x4 + along, x + along);
            a[t] = _mm512_dpbusd_epi32(a[t], _mm512_permutex2var_epi8(first, at, second), four);
            b[t] = _mm512_dpbusd_epi32(b[t], _mm512_permutexvar_epi8(last_at, last), two);
        }
        w = _mm512_dpbusd_epi32(w, ones, four);
        last_w = _mm512_dpbusd_epi32(last_w, ones, two);
    }
    for (int t = 0; t < tile; t++) _mm512_storeu_si512(sums[t], _mm512_add_epi32(a[t], b[t]));
    _mm512_storeu_si512(of_weights, _mm512_add_epi32(w, last_w));
}

WITH_VBMI static void picks_vbmi(const Product *p, size_t slice, const uint8_t *x, uint32_t sums[][LANE],
                                 uint32_t of_weights[LANE], int tile) {
    if (tile == 4) picks_of(p, slice, x, sums, of_weights, 4);
    else if (tile == 2) picks_of(p, slice, x, sums, of_weights, 2);
    else picks_of(p, slice, x, sums, of_weights, 1);
}
#endif

static void *picks_part(void *argument) {
    Part *part = argument;
    const Product *p = part->product;
    const size_t vectors = part->end - part->first;
    uint8_t *codes = malloc((p->columns + 1) * vectors);
    Rounded *rounded = malloc((vectors + 1) * sizeof *rounded);
    part->failed = !codes || !rounded;
    for (size_t b = 0; b < vectors && !part->failed; b++)
        rounded[b] = round_vector(p->x + (part->first + b) * p->columns, p->columns, codes + b * p->columns);
    for (size_t slice = part->first_row; slice < part->end_row && !part->failed; slice++)
        for (size_t b = 0, tile; b < vectors; b += tile) {
            uint32_t sums[4][LANE], of_weights[LANE];
            const uint8_t *x = codes + b * p->columns;
            tile = vectors - b >= 4 ? 4 : vectors - b >= 2 ? 2 : 1;
#if defined(__AVX512F__)
            if (p->has_vnni) picks_vbmi(p, slice, x, sums, of_weights, (int)tile);
            else
#endif
                picks_plain(p, slice, x, sums, of_weights, (int)tile);
            for (size_t t = 0; t < tile; t++)
                for (size_t l = 0; l < LANE; l++) {
                    const int32_t row = p->order[slice * LANE + l];
                    if (row < 0) continue;
                    float *y = p->y + (part->first + b + t) * p->rows + row;
                    *y = unrounded(p, (size_t)row, sums[t][l], of_weights[l], rounded + b + t);
                }
        }
    free(codes);
    free(rounded);
    return NULL;
}
