// Every op the plain and slow way, float32 inside: what the tests' kernels are made of.
#ifndef PLAIN_H
#define PLAIN_H
#include <cmath>
#include <cstring>
#include <vector>

#include "headrace_kernel.h"

using Rows = std::vector<float>;  // (rows, width), row by row

static inline float get(const hr_tensor &t, int64_t i) {
    if (t.dtype == HR_F32) return ((const float *)t.data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)t.data)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void put(const hr_tensor &t, int64_t i, float value) {
    if (t.dtype == HR_F32) {
        ((float *)t.data)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    ((uint16_t *)t.data)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline bool covered(const hr_tensor &t) { return t.dtype == HR_F32 || t.dtype == HR_BF16; }

// x of (rows, width) or (rows, heads, dim), its last dimension dense
static Rows read_rows(const hr_tensor &x) {
    int64_t inner = x.ndim == 3 ? x.shape[2] : x.shape[1], heads = x.ndim == 3 ? x.shape[1] : 1;
    Rows out(x.shape[0] * heads * inner);
    for (int64_t r = 0, o = 0; r < x.shape[0]; r++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < inner; i++)
                out[o++] = get(x, r * x.stride[0] + (x.ndim == 3 ? h * x.stride[1] : 0) + i);
    return out;
}

static void write_rows(const Rows &rows, const hr_tensor &out) {
    for (size_t i = 0; i < rows.size(); i++) put(out, i, rows[i]);
}

static void add(Rows &rows, const hr_tensor &more) {
    if (more.data)
        for (size_t i = 0; i < rows.size(); i++) rows[i] += get(more, i);
}

static Rows linear(const Rows &x, const hr_tensor &weight, const hr_tensor &bias) {
    int64_t in = weight.shape[1], out = weight.shape[0], rows = x.size() / in;
    Rows y(rows * out);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = bias.data ? get(bias, o) : 0.0;
            for (int64_t i = 0; i < in; i++) sum += (double)x[r * in + i] * get(weight, o * in + i);
            y[r * out + o] = (float)sum;
        }
    return y;
}

static void rms_norm(float *x, int64_t size, const hr_tensor &weight, double eps, double offset) {
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += (double)x[i] * x[i];
    double factor = 1.0 / sqrt(sum / size + eps);
    for (int64_t i = 0; i < size; i++) x[i] = (float)(x[i] * factor * (get(weight, i) + offset));
}

static void rms_norm(Rows &x, const hr_tensor &weight, double eps, double offset) {
    if (!weight.data) return;
    for (size_t i = 0; i < x.size(); i += weight.shape[0]) rms_norm(&x[i], weight.shape[0], weight, eps, offset);
}

static inline double act(double x, int64_t activation) {
    if (activation == 0) return x / (1 + exp(-x));
    if (activation == 1) return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static Rows activate(const Rows &gate_up, int64_t rows, int64_t activation) {
    int64_t inner = gate_up.size() / rows / 2;
    Rows y(rows * inner);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i++)
            y[r * inner + i] =
                (float)(act(gate_up[r * 2 * inner + i], activation) * gate_up[r * 2 * inner + inner + i]);
    return y;
}

// one head of one row; angles are row r of cos and sin (rows, 1, n)
static void rope(float *head, const hr_tensor &cos, const hr_tensor &sin, int64_t r) {
    int64_t n = cos.shape[2];
    std::vector<float> was(head, head + n);
    for (int64_t i = 0; i < n; i++)
        head[i] = was[i] * get(cos, r * n + i) + was[(i + n / 2) % n] * get(sin, r * n + i);
}

struct Rule {
    int64_t block_size, num_decodes, window, heads, kv_heads, dim, v_dim;
    double scale, softcap;
};

enum { KEYS, VALUES, SLOT_MAPPING, BLOCK_TABLES, LENS, CHUNKS, CHUNK_TABLES, SINKS };

static void attend(const float *q, float *out, const hr_tensor *c, const Rule &rule, const int64_t *table,
                   int64_t length) {
    int64_t slots = c[KEYS].shape[1];
    int64_t first = rule.window && length > rule.window ? length - rule.window : 0;
    std::vector<double> scores(length);
    for (int64_t h = 0; h < rule.heads; h++) {
        int64_t kv = h / (rule.heads / rule.kv_heads);
        double top = c[SINKS].data ? get(c[SINKS], h) : -INFINITY;
        for (int64_t p = first; p < length; p++) {
            int64_t slot = table[p / rule.block_size] * rule.block_size + p % rule.block_size;
            double score = 0;
            for (int64_t i = 0; i < rule.dim; i++)
                score += (double)q[h * rule.dim + i] * get(c[KEYS], (kv * slots + slot) * rule.dim + i);
            score *= rule.scale;
            if (rule.softcap) score = rule.softcap * tanh(score / rule.softcap);
            scores[p] = score;
            top = fmax(top, score);
        }
        double sum = c[SINKS].data ? exp(get(c[SINKS], h) - top) : 0;
        std::vector<double> mixed(rule.v_dim);
        for (int64_t p = first; p < length; p++) {
            int64_t slot = table[p / rule.block_size] * rule.block_size + p % rule.block_size;
            double weight = exp(scores[p] - top);
            sum += weight;
            for (int64_t i = 0; i < rule.v_dim; i++)
                mixed[i] += weight * get(c[VALUES], (kv * slots + slot) * rule.v_dim + i);
        }
        for (int64_t i = 0; i < rule.v_dim; i++) out[h * rule.v_dim + i] = (float)(mixed[i] / sum);
    }
}

// c: the call's slots from keys to sinks
static Rows attention(const Rows &q, const Rows &k, const Rows &v, const hr_tensor *c, const Rule &rule) {
    const int64_t *slot_mapping = (const int64_t *)c[SLOT_MAPPING].data;
    int64_t rows = c[SLOT_MAPPING].shape[0], slots = c[KEYS].shape[1];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < rule.kv_heads; h++) {
            for (int64_t i = 0; i < rule.dim; i++)
                put(c[KEYS], (h * slots + slot_mapping[r]) * rule.dim + i, k[(r * rule.kv_heads + h) * rule.dim + i]);
            for (int64_t i = 0; i < rule.v_dim; i++)
                put(c[VALUES], (h * slots + slot_mapping[r]) * rule.v_dim + i,
                    v[(r * rule.kv_heads + h) * rule.v_dim + i]);
        }
    int64_t q_width = rule.heads * rule.dim, out_width = rule.heads * rule.v_dim;
    Rows out(rows * out_width);
    for (int64_t r = 0; r < rule.num_decodes; r++) {
        const int64_t *table = (const int64_t *)c[BLOCK_TABLES].data + r * c[BLOCK_TABLES].stride[0];
        attend(&q[r * q_width], &out[r * out_width], c, rule, table, ((const int64_t *)c[LENS].data)[r]);
    }
    for (int64_t n = 0; c[CHUNKS].data && n < c[CHUNKS].shape[0]; n++) {
        const int64_t *chunk = (const int64_t *)c[CHUNKS].data + 3 * n;
        const int64_t *table = (const int64_t *)c[CHUNK_TABLES].data + n * c[CHUNK_TABLES].stride[0];
        for (int64_t r = chunk[0]; r < chunk[1]; r++)
            attend(&q[r * q_width], &out[r * out_width], c, rule, table, chunk[2] + r - chunk[0] + 1);
    }
    return out;
}

// w: the slots from qkv to sinks; ints and floats as attention_block's
static Rows attention_block(const Rows &x, const hr_tensor *w, const int64_t *ints, const double *floats) {
    enum { QKV, QKV_BIAS, O, O_BIAS, Q_NORM, K_NORM, COS, SIN, CACHE };
    Rule rule = {ints[0], ints[1], ints[2], ints[4], ints[3], ints[5], ints[6], floats[0], floats[1]};
    Rows qkv = linear(x, w[QKV], w[QKV_BIAS]);
    int64_t qs = rule.heads * rule.dim, ks = rule.kv_heads * rule.dim, vs = rule.kv_heads * rule.v_dim;
    int64_t width = qs + ks + vs, rows = qkv.size() / width;
    Rows q, k, v;
    for (int64_t r = 0; r < rows; r++) {
        const float *row = &qkv[r * width];
        q.insert(q.end(), row, row + qs);
        k.insert(k.end(), row + qs, row + qs + ks);
        v.insert(v.end(), row + qs + ks, row + width);
    }
    // a norm's weight is as long as what it spans: one head, or all of them
    rms_norm(q, w[Q_NORM], floats[2], floats[3]);
    rms_norm(k, w[K_NORM], floats[2], floats[3]);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t h = 0; h < rule.heads; h++) rope(&q[r * qs + h * rule.dim], w[COS], w[SIN], r);
        for (int64_t h = 0; h < rule.kv_heads; h++) rope(&k[r * ks + h * rule.dim], w[COS], w[SIN], r);
    }
    return linear(attention(q, k, v, w + CACHE, rule), w[O], w[O_BIAS]);
}

// w: the slots from gate_up to down_bias
static Rows mlp(const Rows &x, const hr_tensor *w, int64_t activation) {
    int64_t rows = x.size() / w[0].shape[1];
    return linear(activate(linear(x, w[0], w[1]), rows, activation), w[2], w[3]);
}

#endif
