// A decoder layer's weights in the packed form.
#pragma once
#include "layer_slots.h"
#include "weights.h"

namespace {

// At the start of the packed form. Vectors: their place in bytes; 0: the model has none.
struct LayerPack {
    int64_t bytes, parts;
    int64_t hidden, heads, kv_heads, head_dim, v_head_dim;
    Matrix qkv, o, gate_up, down;
    int64_t qkv_bias, o_bias, gate_up_bias, down_bias, q_norm, k_norm, sinks;
    int64_t input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;

    int64_t query_width() const { return heads * head_dim; }
    int64_t key_width() const { return kv_heads * head_dim; }
};

INLINE bool has_shape(const hr_tensor &t, int64_t out, int64_t in) { return is_weight(t) && t.shape[0] == out && t.shape[1] == in; }

// false: weights that are not covered
INLINE bool lay_out_layer(const hr_call *call, LayerPack &pack) {
    const hr_tensor *t = call->tensors;
    const int64_t *ints = call->ints;
    if (!is_weight(t[S_qkv]) || !is_weight(t[S_o]) || !is_weight(t[S_gate_up]) || !is_weight(t[S_down])) return false;
    pack = {};
    pack.parts = parts_of(call);
    pack.hidden = t[S_qkv].shape[1], pack.heads = ints[I_num_heads], pack.kv_heads = ints[I_num_kv_heads];
    pack.head_dim = ints[I_head_dim], pack.v_head_dim = ints[I_v_head_dim];
    if (pack.kv_heads < 1 || pack.heads < 1 || pack.heads % pack.kv_heads || pack.head_dim < 1 || pack.v_head_dim < 1) return false;
    const int64_t hidden = pack.hidden, inner = t[S_down].shape[1], keys = pack.key_width();
    const int64_t qkv = pack.query_width() + keys + pack.kv_heads * pack.v_head_dim;
    if (!has_shape(t[S_qkv], qkv, hidden) || !has_shape(t[S_o], hidden, pack.heads * pack.v_head_dim)) return false;
    if (!has_shape(t[S_gate_up], 2 * inner, hidden) || !has_shape(t[S_down], hidden, inner)) return false;
    const bool full = ints[I_qk_norm_full];
    const struct {
        int slot;
        int64_t size, *place;
    } vectors[] = {
        {S_qkv_bias, qkv, &pack.qkv_bias}, {S_o_bias, hidden, &pack.o_bias},
        {S_gate_up_bias, 2 * inner, &pack.gate_up_bias}, {S_down_bias, hidden, &pack.down_bias},
        {S_q_norm, full ? pack.query_width() : pack.head_dim, &pack.q_norm}, {S_k_norm, full ? keys : pack.head_dim, &pack.k_norm},
        {S_sinks, pack.heads, &pack.sinks}, {S_input_norm, hidden, &pack.input_norm},
        {S_post_attention_norm, hidden, &pack.post_attention_norm}, {S_pre_mlp_norm, hidden, &pack.pre_mlp_norm},
        {S_post_mlp_norm, hidden, &pack.post_mlp_norm},
    };
    int64_t end = (sizeof(LayerPack) + 63) / 64 * 64;
    for (const auto &vector : vectors) {
        if (!is_vector_or_absent(t[vector.slot], vector.size)) return false;
        *vector.place = reserve(t[vector.slot], end);
    }
    if (!matrix_of(t[S_qkv], false, pack.qkv) || !matrix_of(t[S_o], false, pack.o)) return false;
    if (!matrix_of(t[S_gate_up], true, pack.gate_up) || !matrix_of(t[S_down], false, pack.down)) return false;
    Matrix *order[] = {&pack.qkv, &pack.o, &pack.gate_up, &pack.down};
    pack.bytes = lay_out(order, 4, (int)pack.parts, (end + 4095) / 4096 * 4096);
    return true;
}

INLINE void pack_layer(const hr_call *call, const LayerPack &pack, char *packed) {
    const hr_tensor *t = call->tensors;
    const int parts = (int)pack.parts;
    const double norm = call->floats[F_norm_offset], qk_norm = call->floats[F_qk_norm_offset];
    memcpy(packed, &pack, sizeof pack);
    pack_matrix(pack.qkv, t[S_qkv], parts, packed), pack_matrix(pack.o, t[S_o], parts, packed);
    pack_matrix(pack.gate_up, t[S_gate_up], parts, packed), pack_matrix(pack.down, t[S_down], parts, packed);
    pack_vector(packed, pack.qkv_bias, t[S_qkv_bias], 0), pack_vector(packed, pack.o_bias, t[S_o_bias], 0);
    if (pack.gate_up_bias) widen_gated_bias(t[S_gate_up_bias], (float *)(packed + pack.gate_up_bias));
    pack_vector(packed, pack.down_bias, t[S_down_bias], 0), pack_vector(packed, pack.sinks, t[S_sinks], 0);
    pack_vector(packed, pack.q_norm, t[S_q_norm], qk_norm), pack_vector(packed, pack.k_norm, t[S_k_norm], qk_norm);
    pack_vector(packed, pack.input_norm, t[S_input_norm], norm);
    pack_vector(packed, pack.post_attention_norm, t[S_post_attention_norm], norm);
    pack_vector(packed, pack.pre_mlp_norm, t[S_pre_mlp_norm], norm);
    pack_vector(packed, pack.post_mlp_norm, t[S_post_mlp_norm], norm);
}

}  // namespace
