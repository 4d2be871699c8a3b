// The functions of ds_hf_blocks.h: arguments that would touch other memory are refused, blocks divided among threads.
#include "ds_hf_blocks.h"

#include "kernels.hpp"
#include "parallel.hpp"

namespace {

using namespace ds_hf;

bool known(int32_t type) { return type == DS_HF_F32 || type == DS_HF_BF16 || type == DS_HF_F16; }

int32_t check(const ds_hf_blocks *args) {
    if (args->nbytes != sizeof(ds_hf_blocks)) return DS_HF_WRONG_LAYOUT;
    const bool format = (args->bits == 8 || args->bits == 4 || args->bits == 1) && args->block > 0 &&
                        args->block % 64 == 0 && args->block <= 4096;
    const bool types = known(args->value_type) && (args->other == nullptr || known(args->other_type));
    return format && types ? DS_HF_OK : DS_HF_WRONG_TYPE;
}

int32_t run(const ds_hf_blocks *args, void (*kernel)(const ds_hf_blocks &, Range)) {
    if (const int32_t wrong = check(args)) return wrong;
    const int64_t blocks = args->rows * ((args->numel + args->block - 1) / args->block);
    const int64_t numel = args->rows * args->numel * (args->summed > 0 ? args->summed : 1);
    struct Context {
        const ds_hf_blocks *args;
        void (*kernel)(const ds_hf_blocks &, Range);
    } context = {args, kernel};
    const auto work = [](void *opaque, Range range) {
        const Context &c = *static_cast<Context *>(opaque);
        KeepDenormals keep;
        c.kernel(*c.args, range);
    };
    share(blocks, useful_threads(&numel, 1, args->threads), work, &context);
    return DS_HF_OK;
}

} // namespace

int32_t ds_hf_cpu_blocks_abi(void) { return DS_HF_BLOCKS_ABI; }

int32_t ds_hf_cpu_to_blocks(const ds_hf_blocks *args) { return run(args, kernels().blocks->to_blocks); }

int32_t ds_hf_cpu_from_blocks(const ds_hf_blocks *args) { return run(args, kernels().blocks->from_blocks); }
