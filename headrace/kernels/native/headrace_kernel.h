/* What a kernel written for Headrace is called with. One shared object holds the kernels of one source file.
 *
 * hr_run          required: computes one call. HR_DONE; HR_NOT_MINE when it does not cover such a call (it
 *                 must not have written anything then: the caller falls through); another value: failed.
 * hr_packed_bytes with hr_pack: bytes of the kernel's own form of this call's weights; 0 or less: it does not
 * hr_pack         cover them. The call holds the weight slots and the ints and floats; every other slot is
 *                 absent. From then on hr_run gets the packed form, 64-byte aligned, and absent weight slots.
 *
 * A call has the slots of its op in the order of SIGNATURES in signature.py; docs/kernels.md lists them. It
 * may use up to `threads` threads (OpenMP is there) and must not leave any at work when it returns.
 */
#ifndef HEADRACE_KERNEL_H
#define HEADRACE_KERNEL_H
#include <stdint.h>

#define HR_ABI 1
#define HR_DONE 0
#define HR_NOT_MINE 1
#define HR_MAX_DIMS 6

enum hr_dtype { HR_F32, HR_BF16, HR_F16, HR_F64, HR_I8, HR_U8, HR_I32, HR_I64, HR_BOOL, HR_BLOCKS };

/* data NULL: the slot is absent. Strides count elements. HR_BLOCKS: data points to an hr_blocks, shape is
 * (out, in), strides are 0. */
typedef struct {
    void *data;
    int32_t dtype, ndim;
    int64_t shape[HR_MAX_DIMS], stride[HR_MAX_DIMS];
} hr_tensor;

/* A weight in blocks as GGUF files store them, in parts whose rows lie below each other. A part's rows are
 * (in / elements of a block) blocks each, row after row, from `offset` bytes behind the start of hr_blocks, a
 * multiple of 64. Formats are ggml's type numbers. */
enum hr_format {
    HR_Q4_0 = 2,
    HR_Q4_1 = 3,
    HR_Q8_0 = 8,
    HR_Q4_K = 12,
    HR_Q5_K = 13,
    HR_Q6_K = 14,
    HR_BF16_ROWS = 30
};

typedef struct {
    int64_t format, rows, offset;
} hr_part;

typedef struct {
    int64_t num_parts;
    hr_part part[1]; /* num_parts of them */
} hr_blocks;

typedef struct {
    const hr_tensor *tensors;
    const int64_t *ints;
    const double *floats;
    const void *packed;
    int32_t num_tensors, threads;
} hr_call;

#ifdef __cplusplus
extern "C" {
#endif
int hr_run(const hr_call *call);
int64_t hr_packed_bytes(const hr_call *call);
int hr_pack(const hr_call *call, void *packed);
#ifdef __cplusplus
}
#endif
#endif
