#include "panels.cpp"
// A gated MLP in two phases with a barrier between them: gate and up, then down.

namespace {

// Biases: offsets in the packed form in bytes; 0: the model has none.
struct MlpPack {
    Matrix gate_up, down;
    int64_t gate_up_bias, down_bias;
};

INLINE bool mlp_covers(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    const hr_tensor &up = t[S_gate_up], &down = t[S_down], &up_bias = t[S_gate_up_bias], &down_bias = t[S_down_bias];
    return is_weight(up) && is_weight(down) && up.shape[1] == down.shape[0] && up.shape[0] == 2 * down.shape[1] &&
        (!up_bias.data || is_vector(up_bias, up.shape[0])) && (!down_bias.data || is_vector(down_bias, down.shape[0]));
}
INLINE void lay_out_mlp(const hr_call *call, MlpPack &pack, int64_t &end) {
    const hr_tensor *t = call->tensors;
    pack.gate_up = matrix_of(t[S_gate_up].shape[0], t[S_gate_up].shape[1], true);
    pack.down = matrix_of(t[S_down].shape[0], t[S_down].shape[1], false);
    pack.gate_up_bias = reserve(t[S_gate_up_bias], end), pack.down_bias = reserve(t[S_down_bias], end);
}
INLINE void pack_mlp(const hr_call *call, const MlpPack &pack, int parts, char *packed) {
    const hr_tensor *t = call->tensors;
    pack_matrix(pack.gate_up, t[S_gate_up], parts, packed), pack_matrix(pack.down, t[S_down], parts, packed);
    if (pack.gate_up_bias) widen_gated_bias(t[S_gate_up_bias], (float *)(packed + pack.gate_up_bias));
    pack_vector(packed, pack.down_bias, t[S_down_bias], 0);
}

// act(gate) * up into ``inner``, the operand of ``down``
INLINE void gate_up(const MlpPack &pack, const char *packed, int parts, Team team, const Operand &x, int64_t rows, int64_t kind, const Operand &inner) {
    multiply_gated(pack.gate_up, packed, parts, team, x, rows, vector_at(packed, pack.gate_up_bias), kind, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
        float part[LANES];
        store(part, v);
        inner.put(row, at, part, n);
    });
}

// emit(row, at, n, values) with the bias in them
template <class Emit> INLINE void down(const MlpPack &pack, const char *packed, int parts, Team team, const Operand &inner, int64_t rows, const Emit &emit) {
    const float *bias = vector_at(packed, pack.down_bias);
    multiply_plain(pack.down, packed, parts, team, inner, rows, [&](int64_t row, int64_t at, int64_t n, vf v) __attribute__((always_inline)) {
        emit(row, at, n, bias ? v + load(bias + at) : v);
    });
}

}  // namespace
