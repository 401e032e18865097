#include "attention_decode.cpp"
#include "panels.cpp"
// An attention block in three phases with a barrier between them: project, attend, output.

namespace {

// Offsets in the packed form in bytes; 0: the model has none.
struct AttentionPack {
    Matrix qkv, o;
    int64_t qkv_bias, o_bias, q_norm, k_norm, sinks;
};

INLINE int64_t query_width(const hr_call *call) { return call->ints[I_num_heads] * HR_HEAD_DIM; }
INLINE int64_t value_width(const hr_call *call) { return call->ints[I_num_heads] * HR_V_HEAD_DIM; }

// Whether the weights are such as this block computes.
INLINE bool attention_covers(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    const int64_t *ints = call->ints, heads = ints[I_num_heads], kv_heads = ints[I_num_kv_heads];
    if (kv_heads < 1 || heads != kv_heads * HR_FAN) return false;
    if (ints[I_head_dim] != HR_HEAD_DIM || ints[I_v_head_dim] != HR_V_HEAD_DIM) return false;
    return t[S_qkv].data == nullptr || (is_weight(t[S_qkv]) && is_weight(t[S_o]) &&
        t[S_qkv].shape[0] == query_width(call) + kv_heads * (HR_HEAD_DIM + HR_V_HEAD_DIM) &&
        t[S_o].shape[1] == value_width(call) && t[S_o].shape[0] == t[S_qkv].shape[1] &&
        is_vector_or_absent(t[S_qkv_bias], t[S_qkv].shape[0]) && is_vector_or_absent(t[S_o_bias], t[S_o].shape[0]) &&
        is_vector_or_absent(t[S_q_norm], ints[I_qk_norm_full] ? query_width(call) : HR_HEAD_DIM) &&
        is_vector_or_absent(t[S_k_norm], ints[I_qk_norm_full] ? kv_heads * HR_HEAD_DIM : HR_HEAD_DIM) &&
        is_vector_or_absent(t[S_sinks], heads));
}

INLINE void lay_out_attention(const hr_call *call, AttentionPack &pack, int64_t &end) {
    const hr_tensor *t = call->tensors;
    pack.qkv = matrix_of(t[S_qkv].shape[0], t[S_qkv].shape[1], false);
    pack.o = matrix_of(t[S_o].shape[0], t[S_o].shape[1], false);
    pack.qkv_bias = reserve(t[S_qkv_bias], end), pack.o_bias = reserve(t[S_o_bias], end);
    pack.q_norm = reserve(t[S_q_norm], end), pack.k_norm = reserve(t[S_k_norm], end);
    pack.sinks = reserve(t[S_sinks], end);
}
INLINE void pack_attention(const hr_call *call, const AttentionPack &pack, int parts, char *packed) {
    const hr_tensor *t = call->tensors;
    const double offset = call->floats[F_qk_norm_offset];
    pack_matrix(pack.qkv, t[S_qkv], parts, packed), pack_matrix(pack.o, t[S_o], parts, packed);
    pack_vector(packed, pack.qkv_bias, t[S_qkv_bias], 0), pack_vector(packed, pack.o_bias, t[S_o_bias], 0);
    pack_vector(packed, pack.q_norm, t[S_q_norm], offset), pack_vector(packed, pack.k_norm, t[S_k_norm], offset);
    pack_vector(packed, pack.sinks, t[S_sinks], 0);
}

struct AttentionWork {
    const AttentionPack *pack;
    const char *packed;
    int parts;
    Cache cache;
    Rows cos, sin;
    int64_t rotary_dim, heads, full;
    float eps;
    float *qkv, *partials;
    int64_t qkv_stride;

    // false: not a call that this covers
    bool read(const hr_call *call, const AttentionPack &of, int64_t rows) {
        const hr_tensor *t = call->tensors, &c = t[S_cos], &s = t[S_sin];
        const int64_t *ints = call->ints;
        if (!read_cache(call, S_keys, S_values, S_slot_mapping, S_block_tables, S_lens, rows, ints[I_block_size], ints[I_num_decodes], cache)) return false;
        if (!is_rows(c) || !is_rows(s) || c.ndim != 3 || s.ndim != 3 || c.shape[0] != rows || s.shape[0] != rows) return false;
        if (c.shape[2] != s.shape[2] || c.shape[2] > HR_HEAD_DIM || c.shape[2] % 2) return false;
        if (cache.kv_heads != ints[I_num_kv_heads]) return false;
        pack = &of, packed = (const char *)call->packed;
        cache.window = ints[I_window], cache.scale = (float)call->floats[F_scale];
        cache.softcap = (float)call->floats[F_softcap], cache.sinks = vector_at(packed, pack->sinks);
        cos = rows_of(c), sin = rows_of(s), rotary_dim = c.shape[2];
        heads = ints[I_num_heads], full = ints[I_qk_norm_full], eps = (float)call->floats[F_qk_norm_eps];
        qkv_stride = padded(pack->qkv.out);
        return true;
    }
    void carve(Carver &carver) {
        qkv = carver.take<float>(cache.rows * qkv_stride);
        partials = carver.take<float>(cache.items() * PARTIAL);
    }

    INLINE_MEMBER void project(Team team, const Operand &x) const {
        const float *bias = vector_at(packed, pack->qkv_bias);
        multiply_plain(pack->qkv, packed, parts, team, x, cache.rows, [&](int64_t row, int64_t at, int64_t, vf v) __attribute__((always_inline)) {
            if (bias) v += load(bias + at);
            store(qkv + row * qkv_stride + at, v);
        });
    }

    // 1 / rms over all heads of a projection
    float whole_factor(const float *x, int64_t n) const {
        vf squares = {};
        int64_t i = 0;
        float tail = 0;
        for (; i + LANES <= n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
        for (; i < n; i++) tail += x[i] * x[i];
        return 1.0f / sqrtf((sum(squares) + tail) / (float)n + eps);
    }
    // One head as it goes into the scores: normed and turned.
    void prepare(const float *x, const float *gain, int64_t head, float factor, const float *c, const float *s, float *to) const {
        if (gain && !full) normalise(x, HR_HEAD_DIM, gain, eps, to);
        else if (gain)
            for (int i = 0; i < HR_HEAD_DIM; i++) to[i] = x[i] * factor * gain[head * HR_HEAD_DIM + i];
        else memcpy(to, x, 4 * HR_HEAD_DIM);
        rotate(to, c, s, rotary_dim);
    }

    void attend_all(Team team) const {
        const float *q_norm = vector_at(packed, pack->q_norm), *k_norm = vector_at(packed, pack->k_norm);
        const int64_t kv_heads = cache.kv_heads;
        int64_t turned = -1;
        alignas(64) float c[K_WIDTH], s[K_WIDTH], q[HR_FAN][K_WIDTH], k[K_WIDTH];
        memset(q, 0, sizeof q);
        share_items(cache, team, [&](int64_t row, int64_t head, int64_t chunk, int64_t item) {
            const float *source = qkv + row * qkv_stride;
            if (row != turned) cos.read(row, 0, rotary_dim, c), sin.read(row, 0, rotary_dim, s), turned = row;
            float factor = q_norm && full ? whole_factor(source, heads * HR_HEAD_DIM) : 1.0f;
            for (int f = 0; f < HR_FAN; f++) {
                int64_t at = head * HR_FAN + f;
                prepare(source + at * HR_HEAD_DIM, q_norm, at, factor, c, s, q[f]);
                for (int i = 0; i < HR_HEAD_DIM; i++) q[f][i] *= cache.scale;
            }
            if ((chunk + 1) * HR_CHUNK >= cache.lens[row]) {
                const float *keys = source + heads * HR_HEAD_DIM;
                factor = k_norm && full ? whole_factor(keys, kv_heads * HR_HEAD_DIM) : 1.0f;
                prepare(keys + head * HR_HEAD_DIM, k_norm, head, factor, c, s, k);
                write_key(cache, row, head, k, keys + kv_heads * HR_HEAD_DIM + head * HR_V_HEAD_DIM);
            }
            attend(cache, row, head, chunk, q, partials + item * PARTIAL);
        });
    }

    // emit(row, at, n, values) with the bias in them; ``row`` is this thread's own room for one row
    template <class Emit> INLINE_MEMBER void output(Team team, const Operand &x, float *room, const Emit &emit) const {
        for (int64_t row = 0; row < cache.rows; row++) {
            combine(cache, row, partials, room);
            x.put(row, 0, room, pack->o.in);
        }
        const float *bias = vector_at(packed, pack->o_bias);
        multiply_plain(pack->o, packed, parts, team, x, cache.rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
            emit(row, at, n, bias ? v + load(bias + at) : v);
        });
    }
};

}  // namespace
