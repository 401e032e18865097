#include "plain.h"
enum { Q, K, V, CACHE, OUT = CACHE + 8 };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    const int64_t *n = call->ints;
    Rule rule = {n[0], n[1], n[2], t[Q].shape[1], n[3], t[Q].shape[2], t[V].shape[2], call->floats[0], call->floats[1]};
    write_rows(attention(read_rows(t[Q]), read_rows(t[K]), read_rows(t[V]), t + CACHE, rule), t[OUT]);
    return HR_DONE;
}
