// Products of quantized blocks, as GGUF files store them, with rows of int8 in groups of 32.
//
//     line   │ output 0: k … k+3 │ output 1: k … k+3 │ … │ output 15: k … k+3 │    64 bytes; nibbles: k … k+3 in the
//                                                                               lower half, k+16 … k+19 in the upper
//     group  │ line 0 of outputs 0 … 15 │ line 0 of outputs 16 … 31 │ line 1 of 0 … 15 │ …    32 values of k
//     block  │ scales of 32 outputs │ minima │ its groups │                      1 group, or 8 of the K formats
//     unit   │ block │ block │ …
//
// Nothing is lost and little is added: scales stay float16, a K format's own scales and minima are bytes.
//
// A weight is (u - offset) * scale [+ min] with u unsigned. A group's products are summed as integers, which is
// exact; then, in float32 and in ascending order of groups,
//
//     sum = fma(dot, scale * row's scale, sum)       dot = Σ u * a - offset * Σ a; Q6_K: its two groups of 16
//     sum = fma(min, row's scale * Σ a, sum)         formats with minima
//
// so that a row's bits do not depend on tile, thread or form.
#pragma once
#include <stddef.h>

#include "weights.h"

#ifndef HR_BLOCKS_PREFETCH
#define HR_BLOCKS_PREFETCH 8192  // bytes ahead
#endif

namespace {

// ---- a row of the other operand ----

constexpr int64_t GROUP = 32;

struct Group {
    int8_t values[GROUP];
    float scale;      // greatest magnitude / 127
    float sum;        // scale * sum of values
    int32_t nothing;  // what unsigned weights make too much of the sum, for offsets 0, 8 and 128 …
    int32_t less8, less128;
    int32_t less32[2];  // … and 32, for either half
    int32_t unused;
};
static_assert(sizeof(Group) == 64, "a group is one cache line");

INLINE int64_t groups_stride(int64_t n) { return (n + GROUP - 1) / GROUP * sizeof(Group); }

INLINE void finish_group(Group *to, float scale, int32_t first, int32_t second) {
    const int32_t sum = first + second;
    to->scale = scale, to->sum = scale * (float)sum, to->nothing = 0, to->unused = 0;
    to->less8 = -8 * sum, to->less128 = -128 * sum;
    to->less32[0] = -32 * first, to->less32[1] = -32 * second;
}

// round(x / scale), to nearest even, within ±127; a NaN or an infinity makes the scale one
INLINE void quantize_group(const float *x, Group *to) {
#if defined(__AVX512F__) && defined(__AVX512VL__)
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + LANES);
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    const __m512i larger = _mm512_max_epu32(_mm512_and_si512((__m512i)low, size), _mm512_and_si512((__m512i)high, size));
    __m256i m8 = _mm256_max_epu32(_mm512_castsi512_si256(larger), _mm512_extracti64x4_epi64(larger, 1));
    __m128i m4 = _mm_max_epu32(_mm256_castsi256_si128(m8), _mm256_extracti128_si256(m8, 1));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0x4e));
    m4 = _mm_max_epu32(m4, _mm_shuffle_epi32(m4, 0xb1));
    const float scale = _mm_cvtss_f32((__m128)m4) / 127.0f;
    const __mmask16 some = scale != 0 ? 0xffff : 0;
    const __m512 divisor = _mm512_set1_ps(scale), top = _mm512_set1_ps(127.0f), bottom = _mm512_set1_ps(-127.0f);
    auto round = [&](__m512 v) __attribute__((always_inline)) {
        v = _mm512_min_ps(_mm512_max_ps(_mm512_maskz_div_ps(some, v, divisor), bottom), top);
        return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v));
    };
    const __m128i first = round(low), second = round(high);
    _mm_storeu_si128((__m128i *)to->values, first), _mm_storeu_si128((__m128i *)to->values + 1, second);
    const __m128i flip = _mm_set1_epi8(-128), zero = _mm_setzero_si128();  // bytes + 128, summed by eight
    const __m128i a = _mm_sad_epu8(_mm_xor_si128(first, flip), zero), b = _mm_sad_epu8(_mm_xor_si128(second, flip), zero);
    finish_group(to, scale, _mm_cvtsi128_si32(a) + _mm_extract_epi32(a, 2) - 2048, _mm_cvtsi128_si32(b) + _mm_extract_epi32(b, 2) - 2048);
#else
    uint32_t most = 0;
    for (int i = 0; i < GROUP; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float scale;
    memcpy(&scale, &most, 4);
    scale /= 127.0f;
    int32_t sum[2] = {};
    for (int i = 0; i < GROUP; i++) {
        float v = scale != 0 ? x[i] / scale : 0;
        v = v > -127.0f ? v : -127.0f;
        v = v < 127.0f ? v : 127.0f;
        to->values[i] = (int8_t)__builtin_rintf(v);
        sum[i / 16] += to->values[i];
    }
    finish_group(to, scale, sum[0], sum[1]);
#endif
}

// values [at, at + count) of a row: whole groups, but for a row's last, whose rest counts as zeros
inline void put_groups(char *row, int64_t, int64_t at, const float *values, int64_t count) {
    Group *to = (Group *)row + at / GROUP;
    for (; count >= GROUP; count -= GROUP, values += GROUP) quantize_group(values, to++);
    if (count <= 0) return;
    float rest[GROUP] = {};
    memcpy(rest, values, count * sizeof(float));
    quantize_group(rest, to);
}

// ---- the formats ----

template <int FORMAT> struct Format;
// elements and bytes of a block in the file; groups of a packed one, lines of a group, bytes before its groups
#define HR_FORMAT(NAME, ELEMENTS_, BYTES_, LINES_, HEADER_, OFFSET_, MINIMA_, HALVES_)                   \
    template <> struct Format<NAME> {                                                                    \
        static constexpr int ELEMENTS = ELEMENTS_, BYTES = BYTES_, GROUPS = ELEMENTS_ / 32;              \
        static constexpr int LINES = LINES_, HEADER = HEADER_, BLOCK = HEADER_ + GROUPS * LINES_ * 128;  \
        static constexpr int OFFSET = OFFSET_, HALVES = HALVES_;                                         \
        static constexpr bool MINIMA = MINIMA_;                                                          \
    };
HR_FORMAT(HR_Q4_0, 32, 18, 4, 64, 8, false, 1)
HR_FORMAT(HR_Q4_1, 32, 20, 4, 128, 0, true, 1)
HR_FORMAT(HR_Q8_0, 32, 34, 8, 64, 128, false, 1)
HR_FORMAT(HR_Q4_K, 256, 144, 4, 128 + 512, 0, true, 1)
HR_FORMAT(HR_Q5_K, 256, 176, 5, 128 + 512, 0, true, 1)
HR_FORMAT(HR_Q6_K, 256, 210, 6, 64 + 512, 32, false, 2)
#undef HR_FORMAT

// where a group keeps the start of its sum
template <int OFFSET>
constexpr int START = OFFSET == 0 ? offsetof(Group, nothing) : OFFSET == 8 ? offsetof(Group, less8) : OFFSET == 128 ? offsetof(Group, less128) : offsetof(Group, less32);

// One block of one output, taken apart.
struct Block {
    uint16_t scale = 0, min = 0;       // float16; min negated for the K formats
    uint8_t scales[16] = {}, mins[8] = {};
    uint8_t value[256] = {};           // unsigned
};

// The 6-bit scales and minima of Q4_K and Q5_K: 12 bytes for 8 groups.
INLINE void read_sixes(const uint8_t *p, Block &b) {
    for (int g = 0; g < 4; g++) {
        b.scales[g] = p[g] & 63, b.mins[g] = p[g + 4] & 63;
        b.scales[g + 4] = (p[g + 8] & 15) | p[g] >> 6 << 4;
        b.mins[g + 4] = p[g + 8] >> 4 | p[g + 4] >> 6 << 4;
    }
}

template <int FORMAT> INLINE void read_block(const uint8_t *p, Block &b) {
    auto half = [&](int at) { return (uint16_t)(p[at] | p[at + 1] << 8); };
    if constexpr (FORMAT == HR_Q8_0) {
        b.scale = half(0);
        for (int i = 0; i < 32; i++) b.value[i] = p[2 + i] ^ 128;
    } else if constexpr (FORMAT == HR_Q4_0 || FORMAT == HR_Q4_1) {
        b.scale = half(0);
        if (FORMAT == HR_Q4_1) b.min = half(2);
        p += FORMAT == HR_Q4_1 ? 4 : 2;
        for (int i = 0; i < 16; i++) b.value[i] = p[i] & 15, b.value[i + 16] = p[i] >> 4;
    } else if constexpr (FORMAT == HR_Q4_K || FORMAT == HR_Q5_K) {
        b.scale = half(0), b.min = half(2) ^ 0x8000;
        read_sixes(p + 4, b);
        const uint8_t *high = p + 16, *low = FORMAT == HR_Q5_K ? p + 48 : p + 16;
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) {
                uint8_t v = low[g / 2 * 32 + i] >> (g % 2 * 4) & 15;
                if (FORMAT == HR_Q5_K) v |= (high[i] >> g & 1) << 4;
                b.value[g * 32 + i] = v;
            }
    } else {
        const uint8_t *low = p, *high = p + 128;
        for (int g = 0; g < 8; g++)
            for (int i = 0; i < 32; i++) {
                uint8_t nibble = low[g / 4 * 64 + g % 2 * 32 + i] >> (g % 4 / 2 * 4) & 15;
                b.value[g * 32 + i] = nibble | (high[g / 4 * 32 + i] >> (g % 4 * 2) & 3) << 4;
            }
        memcpy(b.scales, p + 192, 16);
        b.scale = half(208);
    }
}

template <int FORMAT> INLINE void write_block(const Block &b, int output, char *to) {
    using F = Format<FORMAT>;
    uint8_t *bytes = (uint8_t *)to;
    memcpy(to + 2 * output, &b.scale, 2);
    if (F::MINIMA) memcpy(to + 64 + 2 * output, &b.min, 2);
    if constexpr (FORMAT == HR_Q6_K)
        for (int i = 0; i < 16; i++) bytes[64 + i * 32 + output] = b.scales[i];
    if constexpr (FORMAT == HR_Q4_K || FORMAT == HR_Q5_K)
        for (int g = 0; g < 8; g++) bytes[128 + g * 32 + output] = b.scales[g], bytes[384 + g * 32 + output] = b.mins[g];
    bytes += F::HEADER + output / 16 * 64 + output % 16 * 4;
    for (int g = 0; g < F::GROUPS; g++, bytes += F::LINES * 128) {
        const uint8_t *v = b.value + g * 32;
        for (int i = 0; i < 32; i++) {
            const int quad = i / 4, j = i % 4;
            if constexpr (F::LINES == 8) {
                bytes[quad * 128 + j] = v[i];
                continue;
            }
            bytes[quad % 4 * 128 + j] |= (v[i] & 15) << (quad / 4 * 4);
            if constexpr (F::LINES == 5) bytes[4 * 128 + j] |= (v[i] >> 4) << quad;
            if constexpr (F::LINES == 6) bytes[(4 + quad / 4) * 128 + j] |= (v[i] >> 4) << (quad % 4 * 2);
        }
    }
}

template <int FORMAT> int64_t blocks_unit_bytes(int64_t in) { return in / Format<FORMAT>::ELEMENTS * Format<FORMAT>::BLOCK; }

template <int FORMAT> void blocks_pack(const char *const *rows, int64_t in, char *unit) {
    using F = Format<FORMAT>;
    for (int output = 0; output < UNIT; output++) {
        if (!rows[output]) continue;
        const uint8_t *from = (const uint8_t *)rows[output];
        for (int64_t i = 0; i < in / F::ELEMENTS; i++) {
            Block block;
            read_block<FORMAT>(from + i * F::BYTES, block);
            write_block<FORMAT>(block, output, unit + i * F::BLOCK);
        }
    }
}

// ---- reading a packed group ----

INLINE vf load_float16(const char *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    __m256 part[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
    vf v;
    memcpy(&v, part, sizeof v);
    return v;
#else
    vh h;
    memcpy(&h, p, sizeof h);
    const vu u = __builtin_convertvector(h, vu), sign = (u & 0x8000) << 16, rest = u & 0x7fff;
    const vu normal = (rest << 13) + (rest >= 0x7c00 ? (255 - 31) << 23 : (127 - 15) << 23) - vu{};
    const vu small = (vu)(__builtin_convertvector(rest, vf) * 5.9604644775390625e-8f);
    return (vf)(sign | (rest < 0x400 ? small : normal));
#endif
}
template <class Byte> INLINE vf load_bytes(const char *p) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vf)_mm512_cvtepi32_ps((Byte)-1 < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    typedef Byte bytes16 __attribute__((vector_size(16)));
    bytes16 bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
#endif
}

// Unsigned bytes of one group of 16 outputs: w[i] is k = 4 i … 4 i + 3.
template <int FORMAT> INLINE void unpack(const char *lines, vu *w) {
    constexpr int LINES = Format<FORMAT>::LINES;
    if constexpr (LINES == 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) w[i] = load_line(lines + i * 128);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const vu line = load_line(lines + i * 128);
        w[i] = line & 0x0f0f0f0f, w[i + 4] = line >> 4 & 0x0f0f0f0f;
    }
    if constexpr (LINES == 5) {
        const vu high = load_line(lines + 4 * 128);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) w[i] |= (i < 4 ? high << (i < 4 ? 4 - i : 0) : high >> (i < 4 ? 0 : i - 4)) & 0x10101010;
    }
    if constexpr (LINES == 6) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const vu high = load_line(lines + (4 + i / 4) * 128);
            w[i] |= (i % 4 < 3 ? high << (i % 4 < 3 ? 4 - i % 4 * 2 : 0) : high >> 2) & 0x30303030;
        }
    }
}

// Scale (Q6_K: of both halves) and minimum of group ``g`` of a block, of outputs 16 * v …; exact in float32.
template <int FORMAT> INLINE void read_scales(const char *block, int g, int v, vf *scale, vf &min) {
    using F = Format<FORMAT>;
    scale[0] = load_float16(block + 32 * v);
    if (F::MINIMA) min = load_float16(block + 64 + 32 * v);
    if constexpr (FORMAT == HR_Q6_K) {
        scale[1] = scale[0] * load_bytes<int8_t>(block + 64 + (2 * g + 1) * 32 + 16 * v);
        scale[0] = scale[0] * load_bytes<int8_t>(block + 64 + 2 * g * 32 + 16 * v);
    }
    if constexpr (FORMAT == HR_Q4_K || FORMAT == HR_Q5_K) {
        scale[0] = scale[0] * load_bytes<uint8_t>(block + 128 + g * 32 + 16 * v);
        min = min * load_bytes<uint8_t>(block + 384 + g * 32 + 16 * v);
    }
}

// ---- the arithmetic ----

INLINE vi broadcast_int(const char *p) {
    int32_t n;
    memcpy(&n, p, 4);
    return n - vi{};
}
INLINE vf broadcast_float(const char *p) {
    float x;
    memcpy(&x, p, 4);
    return all(x);
}
INLINE vf to_float(vi v) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, vf);
#endif
}

// sum + w · a: four unsigned times four signed bytes in each lane. BIG: w may exceed 127.
template <bool BIG> INLINE vi dot_bytes(vi sum, vu w, const char *a) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int32_t *)a));
    return sum;
#elif defined(__AVX2__)
    int32_t four;
    memcpy(&four, a, 4);
    const __m256i signs = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    __m256i part[2], to[2];
    memcpy(part, &w, 64), memcpy(to, &sum, 64);
    for (int i = 0; i < 2; i++) {
#if defined(__AVXVNNI__)
        to[i] = _mm256_dpbusd_avx_epi32(to[i], part[i], signs);
#else
        __m256i pairs;
        if (BIG) {  // sums of two 255 * 127 do not fit 16 bits: even and odd bytes apart
            const __m256i even = _mm256_and_si256(part[i], _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(part[i], 8);
            to[i] = _mm256_add_epi32(to[i], _mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(signs, 8), 8)));
            to[i] = _mm256_add_epi32(to[i], _mm256_madd_epi16(odd, _mm256_srai_epi16(signs, 8)));
            continue;
        }
        pairs = _mm256_maddubs_epi16(part[i], signs);
        to[i] = _mm256_add_epi32(to[i], _mm256_madd_epi16(pairs, ones));
#endif
    }
    memcpy(&sum, to, 64);
    return sum;
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int j = 0; j < 4; j++) sum[lane] += (int32_t)(w[lane] >> (8 * j) & 255) * (int8_t)a[j];
    return sum;
#endif
}

// One group of 16 outputs times one row's.
template <int FORMAT> INLINE vf add_group(vf acc, const vu *w, const vf *scale, vf min, const char *group) {
    using F = Format<FORMAT>;
    const vf row_scale = broadcast_float(group + offsetof(Group, scale));
#pragma GCC unroll 2
    for (int h = 0; h < F::HALVES; h++) {
        vi dot = broadcast_int(group + START<F::OFFSET> + 4 * h);
#pragma GCC unroll 8
        for (int i = h * 4; i < h * 4 + 8 / F::HALVES; i++) dot = dot_bytes<F::OFFSET == 128>(dot, w[i], group + i * 4);
        acc = fma(to_float(dot), scale[h] * row_scale, acc);
    }
    if (F::MINIMA) acc = fma(min, broadcast_float(group + offsetof(Group, sum)), acc);
    return acc;
}

// A line that is wanted soon, to the second-level cache: the first has no room for as long as many rows take.
template <int FORMAT, int R> INLINE void fetch(const char *line) { __builtin_prefetch(line + HR_BLOCKS_PREFETCH, 0, 2); }

// The compiler would keep an address of each row and value, far more than there are registers.
INLINE const char *next_row(const char *row, int64_t stride) {
    row += stride;
    asm("" : "+r"(row));
    return row;
}

// R rows times V vectors of 16 outputs of a packed unit, the first of them ``v0``. Every step of a row fetches its
// share of the lines ahead: in one burst they would hold up the loads behind them.
template <int FORMAT, int R, int V> __attribute__((noinline)) void blocks_tile(const char *block, int64_t in, const char *x, int64_t stride, vf *out, int v0) {
    using F = Format<FORMAT>;
    vf acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) acc[r][v] = vf{};
    for (const char *end = block + blocks_unit_bytes<FORMAT>(in); block != end; block += F::BLOCK) {
        const char *lines = block + F::HEADER + v0 * 64;
        for (int64_t i = 0; i < F::HEADER; i += 64) fetch<FORMAT, R>(block + i);
#pragma GCC unroll 1
        for (int g = 0; g < F::GROUPS; g++, lines += F::LINES * 128, x += sizeof(Group)) {
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) {
                vu w[8];
                vf scale[2], min = {};
                unpack<FORMAT>(lines + v * 64, w);
                read_scales<FORMAT>(block, g, v0 + v, scale, min);
                const char *row = x;
#pragma GCC unroll 16
                for (int r = 0; r < R; r++, row = next_row(row, stride)) {
                    const int step = v * R + r;
#pragma GCC unroll 16
                    for (int i = step * 2 * F::LINES / (R * V); i < (step + 1) * 2 * F::LINES / (R * V); i++) fetch<FORMAT, R>(lines + i * 64);
                    acc[r][v] = add_group<FORMAT>(acc[r][v], w, scale, min, row);
                }
                if (R > 2) asm volatile("" ::: "memory");  // or the next vector's loads come early and push sums out of registers
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) out[2 * r + v0 + v] = acc[r][v];
}

template <int FORMAT> void blocks_rows(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    switch (rows) {
#define HR_ROWS(n) \
    case n: return blocks_tile<FORMAT, n, 2>(unit, in, x, stride, out, 0);
        HR_ROWS(1) HR_ROWS(2) HR_ROWS(3) HR_ROWS(4)
#ifdef __AVX512F__
        HR_ROWS(5) HR_ROWS(6) HR_ROWS(7) HR_ROWS(8)
#undef HR_ROWS
#define HR_ROWS(n) \
    case n: return blocks_tile<FORMAT, n, 1>(unit, in, x, stride, out, 0), blocks_tile<FORMAT, n, 1>(unit, in, x, stride, out, 1);
        HR_ROWS(9) HR_ROWS(10) HR_ROWS(11) HR_ROWS(12) HR_ROWS(13) HR_ROWS(14) HR_ROWS(15) HR_ROWS(16)
#endif
#undef HR_ROWS
    }
}
#ifdef __AVX512F__
constexpr int BLOCKS_TILE = 16;
#else
constexpr int BLOCKS_TILE = 4;
#endif

template <int FORMAT>
constexpr Product BLOCKS_PRODUCT = {GROUPS, Format<FORMAT>::ELEMENTS, BLOCKS_TILE, BLOCKS_TILE, blocks_unit_bytes<FORMAT>, blocks_pack<FORMAT>,
    blocks_rows<FORMAT>, blocks_rows<FORMAT>, nullptr, nullptr};

INLINE const Product *blocks_product(int64_t format) {
    switch (format) {
#define HR_FORMAT(NAME) \
    case NAME: return &BLOCKS_PRODUCT<NAME>;
        HR_FORMAT(HR_Q4_0) HR_FORMAT(HR_Q4_1) HR_FORMAT(HR_Q8_0) HR_FORMAT(HR_Q4_K) HR_FORMAT(HR_Q5_K) HR_FORMAT(HR_Q6_K)
#undef HR_FORMAT
    }
    return nullptr;
}

}  // namespace
