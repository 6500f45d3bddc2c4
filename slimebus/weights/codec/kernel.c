/* The inner loops of the weight codec over 16-bit values. docs/weights.md draws the streams.
 *
 * Portable C99 for little-endian machines; on x86-64 the scan for changed values also exists for AVX2,
 * chosen when it runs, so one build serves every machine. Nothing here allocates, and nothing here trusts a stream:
 * each apply checks all of its input before it writes the first value. No Python API is used: the library is loaded
 * by ctypes, which releases the interpreter lock around each call.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_X86_SCAN 1
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__GNUC__)
#define INLINE __attribute__((always_inline)) static inline
#define PREFETCH(address) __builtin_prefetch(address)
#else
#error "this file is for GCC and Clang; without them the codec runs on numpy"
#endif

#define LINE_BYTES 64
#define SKIP 255u   /* a gap byte that moves on by 255 values and names none */
#define WIDE 15u    /* a nibble with its step in the wide stream, less WIDE */
#define ESCAPE 255u /* a wide byte with its difference in the escape stream */

/* Output of a scan; the capacities are the caller's promise (see CKernel in kernel.py). */
typedef struct {
    uint8_t *gaps;
    uint8_t *codes; /* one nibble a byte */
    uint8_t *wides;
    uint8_t *escapes; /* u16 little-endian, not aligned */
    uint64_t num_gaps, num_codes, num_wides, num_escapes;
} streams;

static inline uint32_t zigzag(uint16_t difference) {
    int32_t d = (int16_t)difference;
    return (((uint32_t)d << 1) ^ (uint32_t)(d >> 31)) & 0xFFFFu;
}

static inline uint16_t unzigzag(uint32_t z) { return (uint16_t)((z >> 1) ^ (0u - (z & 1u))); }

static inline uint16_t load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

typedef struct {
    uint8_t *gap, *code, *wide, *escape;
    size_t next; /* the first position not yet covered */
} writer;

static inline void emit(writer *w, size_t position, uint16_t difference) {
    size_t gap = position - w->next;
    while (gap >= SKIP) {
        *w->gap++ = SKIP;
        gap -= SKIP;
    }
    *w->gap++ = (uint8_t)gap;
    w->next = position + 1;
    uint32_t step = zigzag(difference);
    if (step < WIDE) {
        *w->code++ = (uint8_t)step;
        return;
    }
    *w->code++ = WIDE;
    if (step - WIDE < ESCAPE) {
        *w->wide++ = (uint8_t)(step - WIDE);
        return;
    }
    *w->wide++ = ESCAPE;
    memcpy(w->escape, &difference, 2);
    w->escape += 2;
}

INLINE void emit_value(writer *w, uint16_t *base, const uint16_t *target, size_t p, int update) {
    uint16_t value = target[p];
    emit(w, p, (uint16_t)(value - base[p]));
    if (update) base[p] = value;
}

/* --- which of 64 values changed, a bit each --- */

INLINE uint64_t changed64(const uint16_t *a, const uint16_t *b) {
    uint8_t changed[64];
    uint64_t mask = 0;
    for (size_t i = 0; i < 64; i++) changed[i] = a[i] != b[i];
    for (size_t i = 0; i < 8; i++) {
        uint64_t eight;
        memcpy(&eight, changed + 8 * i, 8);
        mask |= (eight * 0x0102040810204080u) >> 56 << (8 * i); /* the low bits of eight bytes, side by side */
    }
    return mask;
}

#ifdef HAS_X86_SCAN
#define AVX2 __attribute__((target("avx2,bmi,popcnt")))

AVX2 static inline uint32_t changed32_avx2(const uint16_t *a, const uint16_t *b) {
    __m256i low = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)a), _mm256_loadu_si256((const __m256i *)b));
    __m256i high = _mm256_cmpeq_epi16(_mm256_loadu_si256((const __m256i *)(a + 16)), _mm256_loadu_si256((const __m256i *)(b + 16)));
    __m256i same = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8); /* packs works within 128-bit lanes */
    return ~(uint32_t)_mm256_movemask_epi8(same);
}

AVX2 static inline uint64_t changed64_avx2(const uint16_t *a, const uint16_t *b) {
    return changed32_avx2(a, b) | (uint64_t)changed32_avx2(a + 32, b + 32) << 32;
}
#endif

/* --- the scan, BLOCK values at a time: first compare, then write what changed, so that each loop runs without a guess gone wrong --- */

#define BLOCK 512      /* small enough that the next block is on its way from memory while this one is written */
#define MANY (BLOCK / 16) /* with so many changes a loop over the bits of a mask is the faster one */
#define AT_ONCE 4      /* at 2% changed, 99 of 100 masks have no more bits */

/* The places of the bits of all masks, in order; room for BLOCK + AT_ONCE. */
INLINE size_t list_places(const uint64_t *masks, uint16_t *places) {
    size_t num_places = 0;
    for (size_t k = 0; k < BLOCK / 64; k++) {
        uint64_t mask = masks[k];
        size_t count = (size_t)__builtin_popcountll(mask);
        for (size_t first = 0; first == 0 || first < count; first += AT_ONCE)
            for (size_t i = first; i < first + AT_ONCE; i++) { /* past the last bit it writes what the next mask overwrites */
                places[num_places + i] = (uint16_t)(64 * k + (size_t)__builtin_ctzll(mask | 1ull << 63));
                mask &= mask - 1;
            }
        num_places += count;
    }
    return num_places;
}

/* From the value `from` on, whole blocks; returns where it stopped. */
INLINE size_t scan_blocks(uint16_t *base, const uint16_t *target, size_t from, size_t n, int update, int has_avx2, writer *out) {
    uint64_t masks[BLOCK / 64];
    uint16_t places[BLOCK + AT_ONCE];
    writer w = *out; /* a copy that no store can alias */
    size_t i = from;
    (void)has_avx2;
    for (; i + BLOCK <= n; i += BLOCK) {
        size_t num_changed = 0;
        for (size_t k = 0; k < BLOCK / 64; k++) {
            const uint16_t *a = base + i + 64 * k, *b = target + i + 64 * k;
            for (size_t line = 0; line < 64; line += 32) { /* past the end this reads nothing */
                PREFETCH(a + BLOCK + line);
                PREFETCH(b + BLOCK + line);
            }
#ifdef HAS_X86_SCAN
            masks[k] = has_avx2 ? changed64_avx2(a, b) : changed64(a, b);
#else
            masks[k] = changed64(a, b);
#endif
            num_changed += (size_t)__builtin_popcountll(masks[k]);
        }
        if (num_changed > MANY) {
            for (size_t k = 0; k < BLOCK / 64; k++)
                for (uint64_t mask = masks[k]; mask; mask &= mask - 1)
                    emit_value(&w, base, target, i + 64 * k + (size_t)__builtin_ctzll(mask), update);
            continue;
        }
        list_places(masks, places);
        for (size_t k = 0; k < num_changed; k++) emit_value(&w, base, target, i + places[k], update);
    }
    *out = w;
    return i;
}

static size_t scan_portable(uint16_t *base, const uint16_t *target, size_t from, size_t n, int update, writer *w) {
    return update ? scan_blocks(base, target, from, n, 1, 0, w) : scan_blocks(base, target, from, n, 0, 0, w);
}

#ifdef HAS_X86_SCAN
AVX2 static size_t scan_avx2(uint16_t *base, const uint16_t *target, size_t from, size_t n, int update, writer *w) {
    return update ? scan_blocks(base, target, from, n, 1, 1, w) : scan_blocks(base, target, from, n, 0, 1, w);
}
#endif

static size_t scan_values(uint16_t *base, const uint16_t *target, size_t from, size_t to, int update, writer *w) {
    for (size_t p = from; p < to; p++)
        if (base[p] != target[p]) emit_value(w, base, target, p, update);
    return to;
}

/* 0 portable, 1 AVX2: what the scan uses on this machine. */
EXPORT int slimebus_vector_level(void) {
#ifdef HAS_X86_SCAN
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

/* Writes the sparse streams of target - base; with update, base becomes target. level is at most slimebus_vector_level(). */
EXPORT void slimebus_scan(uint16_t *base, const uint16_t *target, size_t n, int update, int level, streams *out) {
    writer w = {out->gaps, out->codes, out->wides, out->escapes, 0};
    size_t lead = (0 - (size_t)(uintptr_t)base) % LINE_BYTES / sizeof(uint16_t); /* from there on, loads of base lie within cache lines */
    size_t done = scan_values(base, target, 0, lead < n ? lead : n, update, &w);
#ifdef HAS_X86_SCAN
    if (level)
        done = scan_avx2(base, target, done, n, update, &w);
    else
#else
    (void)level;
#endif
        done = scan_portable(base, target, done, n, update, &w);
    scan_values(base, target, done, n, update, &w);
    out->num_gaps = (uint64_t)(w.gap - out->gaps);
    out->num_codes = (uint64_t)(w.code - out->codes);
    out->num_wides = (uint64_t)(w.wide - out->wides);
    out->num_escapes = (uint64_t)(w.escape - out->escapes) / 2;
}

/* Two codes a byte, the first in the low half; an odd last one stands alone. */
EXPORT void slimebus_pack(const uint8_t *codes, size_t num_codes, uint8_t *nibbles) {
    for (size_t i = 0; i < num_codes / 2; i++) nibbles[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    if (num_codes & 1) nibbles[num_codes / 2] = codes[num_codes - 1];
}

/* Scatters the codes of valid streams to their values: nibbles [(n + 1) / 2], zeroed by this call. */
EXPORT void slimebus_densify(size_t n, const uint8_t *gaps, size_t num_gaps, const uint8_t *codes, uint8_t *nibbles) {
    memset(nibbles, 0, (n + 1) / 2);
    size_t p = 0;
    for (size_t i = 0; i < num_gaps; i++) {
        p += gaps[i];
        if (gaps[i] == SKIP) continue;
        nibbles[p >> 1] |= (uint8_t)(*codes++ << ((p & 1) * 4));
        p++;
    }
}

static uint64_t count_equal(const uint8_t *bytes, size_t n, uint8_t wanted) {
    uint64_t count = 0;
    for (size_t i = 0; i < n;) {
        uint32_t part = 0; /* short sums keep the loop in narrow vector lanes */
        size_t end = n - i < 65536 ? n : i + 65536;
        for (; i < end; i++) part += bytes[i] == wanted;
        count += part;
    }
    return count;
}

static uint64_t sum_bytes(const uint8_t *bytes, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n;) {
        uint32_t part = 0;
        size_t end = n - i < 65536 ? n : i + 65536;
        for (; i < end; i++) part += bytes[i];
        sum += part;
    }
    return sum;
}

static uint64_t count_nibble(const uint8_t *nibbles, size_t size, uint8_t wanted) {
    uint64_t count = 0;
    for (size_t i = 0; i < size;) {
        uint32_t part = 0;
        size_t end = size - i < 65536 ? size : i + 65536;
        for (; i < end; i++) part += ((nibbles[i] & 15u) == wanted) + ((nibbles[i] >> 4) == wanted);
        count += part;
    }
    return count;
}

/* True when the nibbles of num_codes codes, the wides and the escapes count each other, and each escape is needed. */
static int are_codes_valid(const uint8_t *nibbles, size_t num_codes, const uint8_t *wides, size_t num_wides, const uint8_t *escapes,
                           size_t num_escapes) {
    for (size_t i = 0; i < num_escapes; i++) {
        int32_t difference = (int16_t)load16(escapes + 2 * i);
        if ((difference < 0 ? -2 * difference - 1 : 2 * difference) < (int32_t)(WIDE + ESCAPE)) return 0;
    }
    if ((num_codes & 1) && (nibbles[num_codes / 2] >> 4)) return 0;
    return count_nibble(nibbles, (num_codes + 1) / 2, WIDE) == num_wides && count_equal(wides, num_wides, ESCAPE) == num_escapes;
}

typedef struct {
    const uint8_t *wide, *escape;
} reader;

static inline uint16_t read_difference(reader *r, uint32_t code) {
    if (code != WIDE) return unzigzag(code);
    uint32_t wide = *r->wide++;
    if (wide != ESCAPE) return unzigzag(wide + WIDE);
    uint16_t difference = load16(r->escape);
    r->escape += 2;
    return difference;
}

/* Adds the steps to values. Returns 0, or 1 with values untouched when the streams do not fit each other or n. */
EXPORT int slimebus_apply_sparse(uint16_t *values, size_t n, const uint8_t *gaps, size_t num_gaps, const uint8_t *nibbles,
                                 size_t num_nibble_bytes, const uint8_t *wides, size_t num_wides, const uint8_t *escapes,
                                 size_t num_escapes) {
    size_t num_codes = num_gaps - count_equal(gaps, num_gaps, SKIP);
    if (num_gaps && gaps[num_gaps - 1] == SKIP) return 1;
    if (num_nibble_bytes != (num_codes + 1) / 2 || !are_codes_valid(nibbles, num_codes, wides, num_wides, escapes, num_escapes)) return 1;
    if (count_nibble(nibbles, num_nibble_bytes, 0) != (num_codes & 1)) return 1; /* 0 is no step; the half that is left over */
    if (sum_bytes(gaps, num_gaps) + num_codes > n) return 1; /* the last position + 1 */
    uint16_t *at = values;
    reader r = {wides, escapes};
    size_t code = 0;
    for (size_t i = 0; i < num_gaps; i++) {
        uint32_t gap = gaps[i];
        at += gap;
        if (gap == SKIP) continue;
        *at = (uint16_t)(*at + read_difference(&r, (nibbles[code >> 1] >> ((code & 1) * 4)) & 15u));
        code++;
        at++;
    }
    return 0;
}

/* As slimebus_apply_sparse; nibbles has (n + 1) / 2 bytes, one nibble for each value. */
EXPORT int slimebus_apply_dense(uint16_t *values, size_t n, const uint8_t *nibbles, const uint8_t *wides, size_t num_wides,
                                const uint8_t *escapes, size_t num_escapes) {
    if (!are_codes_valid(nibbles, n, wides, num_wides, escapes, num_escapes)) return 1;
    reader r = {wides, escapes};
    for (size_t p = 0; p + 2 <= n; p += 2) {
        uint32_t pair = nibbles[p >> 1];
        values[p] = (uint16_t)(values[p] + read_difference(&r, pair & 15u));
        values[p + 1] = (uint16_t)(values[p + 1] + read_difference(&r, pair >> 4));
    }
    if (n & 1) values[n - 1] = (uint16_t)(values[n - 1] + read_difference(&r, nibbles[n / 2] & 15u));
    return 0;
}
