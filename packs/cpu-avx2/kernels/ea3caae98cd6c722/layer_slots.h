// What a decoder_layer is called with, in the order of docs/kernels.md.
#pragma once

namespace {

enum {
    S_x, S_input_norm, S_post_attention_norm, S_pre_mlp_norm, S_post_mlp_norm,
    S_qkv, S_qkv_bias, S_o, S_o_bias, S_q_norm, S_k_norm, S_cos, S_sin,
    S_keys, S_values, S_slot_mapping, S_block_tables, S_lens, S_chunks, S_chunk_tables, S_sinks,
    S_gate_up, S_gate_up_bias, S_down, S_down_bias, S_out
};
enum { I_block_size, I_num_decodes, I_window, I_num_kv_heads, I_num_heads, I_head_dim, I_v_head_dim, I_qk_norm_full, I_activation };
enum { F_scale, F_softcap, F_qk_norm_eps, F_qk_norm_offset, F_norm_eps, F_norm_offset };

}  // namespace
