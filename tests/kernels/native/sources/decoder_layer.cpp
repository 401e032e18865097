#include "plain.h"
enum { X, INPUT_NORM, POST_ATTENTION_NORM, PRE_MLP_NORM, POST_MLP_NORM, QKV, GATE_UP = QKV + 16, OUT = GATE_UP + 4 };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    double eps = call->floats[4], offset = call->floats[5];
    Rows x = read_rows(t[X]), h = x;
    rms_norm(h, t[INPUT_NORM], eps, offset);
    h = attention_block(h, t + QKV, call->ints, call->floats);
    rms_norm(h, t[POST_ATTENTION_NORM], eps, offset);
    for (size_t i = 0; i < x.size(); i++) x[i] += h[i];
    h = x;
    rms_norm(h, t[PRE_MLP_NORM], eps, offset);
    h = mlp(h, t + GATE_UP, call->ints[8]);
    rms_norm(h, t[POST_MLP_NORM], eps, offset);
    for (size_t i = 0; i < x.size(); i++) x[i] += h[i];
    write_rows(x, t[OUT]);
    return HR_DONE;
}
