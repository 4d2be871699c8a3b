/* The C interface of the 1-bit optimizers' passes: what ds_hf/engine/ops/cpu_onebit.py mirrors with ctypes.
 *
 * What the functions compute is written down in ds_hf/engine/ops/onebit.py. It has an ABI number of its own: a library
 * from before it serves everything else all the same.
 */
#ifndef DS_HF_ONEBIT_H
#define DS_HF_ONEBIT_H

#include "ds_hf_cpu.h"

#define DS_HF_ONEBIT_ABI 1

#ifdef __cplusplus
extern "C" {
#endif

struct ds_hf_onebit {
    double lr, beta1, eps, weight_decay;
    int32_t eps_inside_sqrt;
};

DS_HF_EXPORT int32_t ds_hf_cpu_onebit_abi(void);

/* Lists: params are what is written, grads, firsts the momenta, seconds, and steps the floors. */
DS_HF_EXPORT int32_t ds_hf_cpu_onebit_values(const struct ds_hf_lists *lists, const struct ds_hf_onebit *args);

/* Lists: params, grads are the means, firsts the momenta, seconds, outs, and steps the floors. */
DS_HF_EXPORT int32_t ds_hf_cpu_onebit_apply(const struct ds_hf_lists *lists, const struct ds_hf_onebit *args);

#ifdef __cplusplus
}
#endif

#endif
