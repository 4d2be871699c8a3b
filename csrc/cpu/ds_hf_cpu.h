/* The C interface of the CPU optimizer kernels: what ds_hf/engine/ops/cpu.py mirrors with ctypes.
 *
 * Plain C, so that one library serves every Python and every torch. What the functions compute is written down in
 * ds_hf/engine/ops/reference.py; arguments of the same name mean the same. Pointers need the alignment of their
 * elements and no more. The caller has checked everything; each function only refuses structs of another layout.
 */
#ifndef DS_HF_CPU_H
#define DS_HF_CPU_H

#include <stdint.h>

#define DS_HF_CPU_ABI 1 /* goes up with every change of this file; cpu.py compares it before any other call */
#define DS_HF_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum ds_hf_type { DS_HF_NONE = 0, DS_HF_F32 = 1, DS_HF_BF16 = 2, DS_HF_F16 = 3 };
enum ds_hf_status { DS_HF_OK = 0, DS_HF_WRONG_LAYOUT = 1, DS_HF_WRONG_TYPE = 2, DS_HF_NO_MEMORY = 3 };

/* Lists of tensors: [count] pointers each; a list that an op does not have is a null pointer of type none. */
struct ds_hf_lists {
    int64_t nbytes; /* sizeof(struct ds_hf_lists), as the caller sees it */
    int64_t count;
    const int64_t *numels;
    void *const *params;
    const void *const *grads;
    void *const *firsts;  /* exp_avgs, sums or momentum_buffers */
    void *const *seconds; /* exp_avg_sqs */
    void *const *outs;
    const float *const *steps;
    const float *control; /* null, or [2] */
    uint64_t seed;        /* read where stochastic is not 0 */
    int32_t stochastic;
    int32_t threads; /* at most so many; short lists use fewer */
    int32_t param_type, grad_type, moment_type, out_type;
};

struct ds_hf_adam {
    double lr, beta1, beta2, eps, weight_decay;
    int32_t decoupled, bias_correction;
};

struct ds_hf_lion {
    double lr, beta1, beta2, weight_decay;
};

struct ds_hf_adagrad {
    double lr, lr_decay, eps, weight_decay;
};

struct ds_hf_sgd {
    double lr, momentum, dampening, weight_decay;
    int32_t nesterov, first;
};

struct ds_hf_lamb {
    double lr, beta1, beta2, eps, weight_decay, min_coeff, max_coeff; /* moments: neither lr nor the coefficients */
    int32_t eps_inside_sqrt, bias_correction;
};

DS_HF_EXPORT int32_t ds_hf_cpu_abi(void);

/* The instruction set in use: "avx512", "avx2" or "baseline". */
DS_HF_EXPORT const char *ds_hf_cpu_isa(void);

/* Choose one, for tests; "" is the best one. 0 where this processor has it; otherwise nothing changes. Not to be
 * called while another thread is in an op. */
DS_HF_EXPORT int32_t ds_hf_cpu_set_isa(const char *name);

DS_HF_EXPORT int32_t ds_hf_cpu_adam(const struct ds_hf_lists *lists, const struct ds_hf_adam *args);
DS_HF_EXPORT int32_t ds_hf_cpu_lion(const struct ds_hf_lists *lists, const struct ds_hf_lion *args);
DS_HF_EXPORT int32_t ds_hf_cpu_adagrad(const struct ds_hf_lists *lists, const struct ds_hf_adagrad *args);
DS_HF_EXPORT int32_t ds_hf_cpu_sgd(const struct ds_hf_lists *lists, const struct ds_hf_sgd *args);

/* norms: [count, 2], written by the first and read by the second. */
DS_HF_EXPORT int32_t ds_hf_cpu_lamb_moments(const struct ds_hf_lists *lists, const struct ds_hf_lamb *args,
                                            float *norms);
DS_HF_EXPORT int32_t ds_hf_cpu_lamb_apply(const struct ds_hf_lists *lists, const struct ds_hf_lamb *args,
                                          const float *norms);

/* Of the grads. The same bits for any number of threads. */
DS_HF_EXPORT int32_t ds_hf_cpu_squared_norm(const struct ds_hf_lists *lists, float *result);

#ifdef __cplusplus
}
#endif

#endif
