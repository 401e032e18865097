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

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HR_BLOCKS_512 1
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
#ifdef HR_BLOCKS_512
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

// As wide as registers are: 64 bytes for the compiler to split would pass through memory.
#ifdef HR_BLOCKS_512
constexpr int WIDE = 16;
#else
constexpr int WIDE = 8;
#endif
constexpr int VECTORS = UNIT / WIDE;
typedef float wf __attribute__((vector_size(4 * WIDE)));
typedef int32_t wi __attribute__((vector_size(4 * WIDE)));
typedef uint32_t wu __attribute__((vector_size(4 * WIDE)));

INLINE wf load_float16(const char *p) {
#ifdef HR_BLOCKS_512
    return (wf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (wf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    wf out;
    for (int i = 0; i < WIDE; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        const uint32_t rest = h & 0x7fff;
        uint32_t bits = rest << 13;
        bits += rest >= 0x7c00 ? (255 - 31) << 23 : (127 - 15) << 23;
        float small = (float)rest * 0x1p-24f, size;
        memcpy(&size, &bits, 4);
        size = rest < 0x400 ? small : size;
        out[i] = h & 0x8000 ? -size : size;
    }
    return out;
#endif
}
template <class Byte> INLINE wf load_bytes(const char *p) {
#ifdef HR_BLOCKS_512
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (wf)_mm512_cvtepi32_ps((Byte)-1 < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return (wf)_mm256_cvtepi32_ps((Byte)-1 < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    wf out;
    for (int i = 0; i < WIDE; i++) out[i] = (float)((const Byte *)p)[i];
    return out;
#endif
}

// Where vector ``v`` of a unit's outputs starts in a pair of lines.
constexpr int64_t line_start(int v) { return v * WIDE / 16 * 64 + v * WIDE % 16 * 4; }

// Unsigned bytes of a vector of outputs of one group: w[i] is k = 4 i … 4 i + 3. Each line is loaded once.
template <int FORMAT> INLINE void unpack(const char *lines, wu *w) {
    constexpr int LINES = Format<FORMAT>::LINES;
    wu line[8];
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) {
        memcpy(&line[i], lines + i * 128, sizeof line[i]);
#ifdef HR_BLOCKS_512
        if (LINES < 8) asm volatile("" : "+v"(line[i]));
#endif
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        if constexpr (LINES == 8) w[i] = line[i];
        else w[i] = (i < 4 ? line[i] : line[i - 4] >> 4) & 0x0f0f0f0f;
        if constexpr (LINES == 5) w[i] |= (i < 4 ? line[4] << (i < 4 ? 4 - i : 0) : line[4] >> (i < 4 ? 0 : i - 4)) & 0x10101010;
        if constexpr (LINES == 6) w[i] |= (i % 4 < 3 ? line[4 + i / 4] << (i % 4 < 3 ? 4 - i % 4 * 2 : 0) : line[4 + i / 4] >> 2) & 0x30303030;
    }
}

// Scale (Q6_K: of both halves) and minimum of group ``g`` of a block, for vector ``v``; exact in float32.
template <int FORMAT> INLINE void read_scales(const char *block, int g, int v, wf *scale, wf &min) {
    using F = Format<FORMAT>;
    const int at = v * WIDE;
    scale[0] = load_float16(block + 2 * at);
    if (F::MINIMA) min = load_float16(block + 64 + 2 * at);
    if constexpr (FORMAT == HR_Q6_K) {
        scale[1] = scale[0] * load_bytes<int8_t>(block + 64 + (2 * g + 1) * 32 + at);
        scale[0] = scale[0] * load_bytes<int8_t>(block + 64 + 2 * g * 32 + at);
    }
    if constexpr (FORMAT == HR_Q4_K || FORMAT == HR_Q5_K) {
        scale[0] = scale[0] * load_bytes<uint8_t>(block + 128 + g * 32 + at);
        min = min * load_bytes<uint8_t>(block + 384 + g * 32 + at);
    }
}

// ---- the arithmetic ----

template <class T> INLINE T value_at(const char *p) {
    T value;
    memcpy(&value, p, sizeof value);
    return value;
}
INLINE wf fused(wf a, wf b, wf c) {
#ifdef HR_BLOCKS_512
    return (wf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (wf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// sum + w · a: COUNT times four unsigned and four signed bytes in each lane, the unsigned at most MOST
template <int MOST, int COUNT> INLINE wi dot_bytes(wi sum, const wu *w, const char *a) {
#if defined(HR_BLOCKS_512) && defined(__AVX512VNNI__)
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w[i]), "m"(*(const int32_t *)(a + 4 * i)));
#elif defined(HR_BLOCKS_512)
    const __m512i low = _mm512_set1_epi16(255), ones = _mm512_set1_epi16(1);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) {
        const __m512i four = _mm512_set1_epi32(value_at<int32_t>(a + 4 * i)), u = (__m512i)w[i];
        if (MOST < 128) {
            sum += (wi)_mm512_madd_epi16(_mm512_maddubs_epi16(u, four), ones);
        } else {  // two of 255 * 127 do not fit 16 bits: even and odd bytes apart
            sum += (wi)_mm512_madd_epi16(_mm512_and_si512(u, low), _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8));
            sum += (wi)_mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(four, 8));
        }
    }
#elif defined(__AVX2__)
    constexpr int TOGETHER = MOST < 16 ? 8 : MOST < 32 ? 4 : MOST < 64 ? 2 : 1;  // fit 16 bits
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i += TOGETHER) {
        __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = i; j < i + TOGETHER && j < COUNT; j++) {
            const __m256i four = _mm256_set1_epi32(value_at<int32_t>(a + 4 * j));
            __m256i products;
            if (MOST < 128) {
                products = _mm256_maddubs_epi16((__m256i)w[j], four);
            } else {  // as (u - 128) · a + 128 Σ a: a number of up to 128 times one of 127 leaves room
                const __m256i centred = _mm256_xor_si256((__m256i)w[j], _mm256_set1_epi8(-128));
                products = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(four, centred));
            }
            pairs = j == i ? products : _mm256_add_epi16(pairs, products);
        }
        sum += (wi)_mm256_madd_epi16(pairs, ones);
    }
#else
    for (int lane = 0; lane < WIDE; lane++)
        for (int j = 0; j < 4 * COUNT; j++) sum[lane] += (int32_t)(w[j / 4][lane] >> (8 * (j % 4)) & 255) * (int8_t)a[j];
#endif
    return sum;
}
// whether dot_bytes takes 128 off values that may exceed 127
#if defined(__AVX2__) && !defined(HR_BLOCKS_512)
constexpr bool CENTRED = true;
#else
constexpr bool CENTRED = false;
#endif

// One group of a vector of outputs times one row's.
template <int FORMAT> INLINE wf add_group(wf acc, const wu *w, const wf *scale, wf min, const char *group) {
    using F = Format<FORMAT>;
    constexpr int OFFSET = F::OFFSET == 128 && CENTRED ? 0 : F::OFFSET, MOST = F::LINES == 8 ? 255 : F::LINES == 6 ? 63 : F::LINES == 5 ? 31 : 15;
    const wf row_scale = value_at<float>(group + offsetof(Group, scale)) - wf{};
#pragma GCC unroll 2
    for (int h = 0; h < F::HALVES; h++) {
        wi dot = value_at<int32_t>(group + START<OFFSET> + 4 * h) - wi{};
        dot = dot_bytes<MOST, 8 / F::HALVES>(dot, w + h * 4, group + h * 16);
        acc = fused(__builtin_convertvector(dot, wf), scale[h] * row_scale, acc);
    }
    if (F::MINIMA) acc = fused(min, value_at<float>(group + offsetof(Group, sum)) - wf{}, acc);
    return acc;
}

// A line that is read soon. A step of few rows of simple blocks reads at a pace that the processor's own prefetching
// keeps, and better alone; the more rows, the longer what was fetched must stay: in the second-level cache.
template <int FORMAT, int R> INLINE void fetch(const char *line) {
    using F = Format<FORMAT>;
    if (F::GROUPS == 1 && R <= F::LINES / 4) return;
    __builtin_prefetch(line + HR_BLOCKS_PREFETCH, 0, R == 1 ? 3 : 2);
    if (R > 1 && R <= 8) __builtin_prefetch(line + HR_BLOCKS_PREFETCH / 8, 0, 3);
}

// The compiler would keep an address of each row and value, far more than there are registers.
INLINE const char *next_row(const char *row, int64_t stride) {
    row += stride;
    asm("" : "+r"(row));
    return row;
}

// R rows times V vectors of outputs of a packed unit, the first of them ``v0``. Every step of a row fetches its
// share of what is read soon: in one burst it would hold up the loads behind it.
template <int FORMAT, int R, int V> __attribute__((noinline)) void blocks_tile(const char *block, int64_t in, const char *x, int64_t stride, vf *out, int v0) {
    using F = Format<FORMAT>;
    wf acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[r][v] = wf{};
    constexpr int SHARE = F::BLOCK / F::GROUPS, FETCHES = (SHARE + 63) / 64;
    const char *soon = block;
    for (const char *end = block + blocks_unit_bytes<FORMAT>(in); block != end; block += F::BLOCK) {
        const char *lines = block + F::HEADER;
#pragma GCC unroll 1
        for (int g = 0; g < F::GROUPS; g++, lines += F::LINES * 128, x += sizeof(Group), soon += SHARE) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                wu w[8];
                wf scale[2], min = {};
                unpack<FORMAT>(lines + line_start(v0 + v), w);
                read_scales<FORMAT>(block, g, v0 + v, scale, min);
                const char *row = x;
#pragma GCC unroll 16
                for (int r = 0; r < R; r++, row = next_row(row, stride)) {
                    const int step = v * R + r;
#pragma GCC unroll 16
                    for (int i = step * FETCHES / (R * V); i < (step + 1) * FETCHES / (R * V); i++) fetch<FORMAT, R>(soon + i * 64);
                    acc[r][v] = add_group<FORMAT>(acc[r][v], w, scale, min, row);
                }
                if (R > 2) asm volatile("" ::: "memory");  // or the next vector's loads come early and push sums out of registers
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) memcpy((float *)(out + 2 * r) + (v0 + v) * WIDE, &acc[r][v], sizeof(wf));
}

template <int FORMAT> void blocks_rows(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    switch (rows) {
#define HR_ROWS(n) \
    case n: return blocks_tile<FORMAT, n, VECTORS>(unit, in, x, stride, out, 0);
        HR_ROWS(1) HR_ROWS(2) HR_ROWS(3) HR_ROWS(4)
#ifdef HR_BLOCKS_512
        HR_ROWS(5) HR_ROWS(6) HR_ROWS(7) HR_ROWS(8)
#undef HR_ROWS
#define HR_ROWS(n) \
    case n: return blocks_tile<FORMAT, n, 1>(unit, in, x, stride, out, 0), blocks_tile<FORMAT, n, 1>(unit, in, x, stride, out, 1);
        HR_ROWS(9) HR_ROWS(10) HR_ROWS(11) HR_ROWS(12) HR_ROWS(13) HR_ROWS(14) HR_ROWS(15) HR_ROWS(16)
#endif
#undef HR_ROWS
    }
}
#ifdef HR_BLOCKS_512
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
