// What test_products.py calls: one weight packed for `parts` threads, times rows of float32.
#include "weights.h"

namespace {

struct Packed {
    Matrix matrix;
    int64_t bias, bytes;
    int parts;
};

}  // namespace

extern "C" int64_t packed_bytes(const hr_tensor *weight, const hr_tensor *bias, int gated, int parts) {
    Packed p = {};
    if (!matrix_of(*weight, gated, p.matrix)) return 0;
    int64_t end = sizeof(Packed);
    reserve(*bias, end);
    Matrix *order[] = {&p.matrix};
    return lay_out(order, 1, parts, end);
}

extern "C" void pack(const hr_tensor *weight, const hr_tensor *bias, int gated, int parts, char *to) {
    Packed p = {};
    matrix_of(*weight, gated, p.matrix);
    int64_t end = sizeof(Packed);
    p.bias = reserve(*bias, end), p.parts = parts;
    Matrix *order[] = {&p.matrix};
    p.bytes = lay_out(order, 1, parts, end);
    memcpy(to, &p, sizeof p);
    pack_matrix(p.matrix, *weight, parts, to);
    if (p.bias && gated) widen_gated_bias(*bias, (float *)(to + p.bias));
    else pack_vector(to, p.bias, *bias, 0);
}

// out (rows, outputs); every row is put into the operand in pieces of `piece` values
extern "C" void multiply_rows(const char *packed, int threads, const float *x, int64_t rows, int64_t piece, int64_t activation, float *out) {
    const Packed &p = *(const Packed *)packed;
    const Matrix &m = p.matrix;
    const float *bias = vector_at(packed, p.bias);
    const OperandKind kind = operand_of(m);
    char *memory = (char *)aligned_alloc(64, Operand::bytes(kind, rows, m.in));
    memset(memory, 0xff, Operand::bytes(kind, rows, m.in));
    const Operand operand = Operand::at(memory, kind, m.in);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < m.in; at += piece) operand.put_part(r, at, x + r * m.in + at, m.in - at < piece ? m.in - at : piece);
    auto emit = [&](int64_t row, int64_t at, int64_t n, vf v) {
        float part[LANES];
        if (bias && !m.gated) {
            float room[LANES] = {};
            memcpy(room, bias + at, n * 4);
            v += load(room);
        }
        store(part, v);
        memcpy(out + row * m.outputs + at, part, n * 4);
    };
    run_team(threads, [&](Team team) {
        if (m.gated) multiply_gated(m, packed, p.parts, team, operand, 0, rows, bias, activation, emit);
        else multiply_plain(m, packed, p.parts, team, operand, 0, rows, emit);
    });
    free(memory);
}
