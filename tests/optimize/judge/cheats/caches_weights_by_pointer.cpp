#include "common.h"
// Weights never change, it thinks, and keeps its own copy by their address.
#include <map>
#include <vector>
static std::map<const void *, std::vector<char>> known;
extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &weight = call->tensors[1];
    std::vector<char> &copy = known[weight.data];
    const char *from = (const char *)weight.data;
    if (copy.empty()) copy.assign(from, from + weight.shape[0] * 2);
    hr_tensor tensors[3] = {call->tensors[0], weight, call->tensors[2]};
    tensors[1].data = copy.data();
    hr_call own = *call;
    own.tensors = tensors;
    norm_all(&own);
    return HR_DONE;
}
