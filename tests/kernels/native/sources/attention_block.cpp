#include "plain.h"
enum { X, QKV, RESIDUAL = QKV + 16, OUT };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    Rows y = attention_block(read_rows(t[X]), t + QKV, call->ints, call->floats);
    add(y, t[RESIDUAL]);
    write_rows(y, t[OUT]);
    return HR_DONE;
}
