// Every op, dtype, length, alignment and number of threads, run for the sanitizers' sake: ctest builds this with them.
//
// That the numbers are right is shown by tests/engine/ops/test_cpu.py against torch. Here each tensor is an allocation
// of its own, so that AddressSanitizer sees an access of one byte too many, and has guard bytes where it starts at
// other addresses than malloc's. Results are compared with a plain loop for AdamW and the norm.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ds_hf_cpu.h"
#include "ds_hf_onebit.h"

namespace {

int failures = 0;

void expect(bool holds, const std::string &what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    ++failures;
}

int64_t width(int32_t type) { return type == DS_HF_F32 ? 4 : 2; }

// One tensor: `offset` elements of guard, the values, and the end of the allocation.
class Tensor {
  public:
    Tensor(int32_t type, int64_t numel, int64_t offset, float value) : type_(type), numel_(numel), offset_(offset) {
        bytes_.reset(new char[static_cast<size_t>((numel + offset) * width(type))]);
        std::memset(bytes_.get(), 0x5a, static_cast<size_t>((numel + offset) * width(type)));
        for (int64_t i = 0; i < numel; ++i) set(i, value * static_cast<float>(1 + i % 7));
    }

    void *data() const { return bytes_.get() + offset_ * width(type_); }

    float get(int64_t i) const { // of fp32 and bf16
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char *>(&bits) + (4 - width(type_)), at(i), static_cast<size_t>(width(type_)));
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    bool guarded() const {
        for (int64_t i = 0; i < offset_ * width(type_); ++i)
            if (bytes_[static_cast<size_t>(i)] != 0x5a) return false;
        return true;
    }

  private:
    char *at(int64_t i) const { return bytes_.get() + (offset_ + i) * width(type_); }

    void set(int64_t i, float value) { // fp16 gets numbers as well, only others
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        std::memcpy(at(i), reinterpret_cast<char *>(&bits) + (4 - width(type_)), static_cast<size_t>(width(type_)));
    }

    int32_t type_;
    int64_t numel_, offset_;
    std::unique_ptr<char[]> bytes_;
};

struct Column {
    std::vector<Tensor> tensors;
    std::vector<void *> addresses;

    Column(int32_t type, const std::vector<int64_t> &numels, int64_t offset, float value) {
        if (type == DS_HF_NONE) return;
        for (int64_t numel : numels) tensors.emplace_back(type, numel, offset, value);
        for (const Tensor &tensor : tensors) addresses.push_back(tensor.data());
    }

    void *const *list() const { return addresses.empty() ? nullptr : addresses.data(); }

    bool guarded() const {
        for (const Tensor &tensor : tensors)
            if (!tensor.guarded()) return false;
        return true;
    }
};

const std::vector<int64_t> lengths = {0, 1, 3, 7, 16, 33, 1000, 8209};

// All that one call needs.
struct Call {
    Column params, grads, firsts, seconds, outs;
    float step = 3, control[2];
    std::vector<const float *> steps;
    std::vector<int64_t> numels;
    ds_hf_lists lists = {};

    Call(int32_t param, int32_t grad, int32_t moment, int32_t out, int64_t offset, bool skip)
        : params(param, lengths, offset, 0.5f), grads(grad, lengths, offset ? offset + 1 : 0, 0.25f),
          firsts(moment, lengths, offset, 0.125f), seconds(moment, lengths, offset ? 3 - offset : 0, 0.125f),
          outs(out, lengths, offset ? offset + 2 : 0, 0), control{0.5f, skip ? 1.0f : 0.0f},
          steps(lengths.size(), &step), numels(lengths) {
        lists.nbytes = sizeof lists;
        lists.count = static_cast<int64_t>(lengths.size());
        lists.numels = numels.data();
        lists.params = params.list();
        lists.grads = const_cast<const void *const *>(grads.list());
        lists.firsts = firsts.list();
        lists.seconds = seconds.list();
        lists.outs = outs.list();
        lists.steps = steps.data();
        lists.control = control;
        lists.param_type = param;
        lists.grad_type = grad;
        lists.moment_type = moment;
        lists.out_type = out;
        lists.threads = 1;
    }

    void check(const std::string &name) const {
        for (const Column *column : {&params, &grads, &firsts, &seconds, &outs})
            expect(column->guarded(), name + ": a guard was overwritten");
    }
};

const ds_hf_adam adam = {1e-2, 0.9, 0.99, 1e-6, 0.1, 1, 1};
const ds_hf_lion lion = {1e-2, 0.9, 0.99, 0.1};
const ds_hf_adagrad adagrad = {1e-2, 0.1, 1e-6, 0.1};
const ds_hf_sgd momentum = {1e-2, 0.9, 0.1, 0.1, 1, 0}, plain = {1e-2, 0, 0, 0.1, 0, 0};
const ds_hf_onebit onebit = {1e-2, 0.9, 1e-6, 0.1, 0};
const ds_hf_lamb lamb = {1e-2, 0.9, 0.99, 1e-6, 0.1, 0.01, 10, 0, 1};

int32_t run(int op, const ds_hf_lists &lists) {
    std::vector<float> norms(2 * lengths.size());
    ds_hf_lists less = lists;
    float norm = 0;
    switch (op) {
    case 0: return ds_hf_cpu_adam(&less, &adam);
    case 1: less.seconds = nullptr; return ds_hf_cpu_lion(&less, &lion);
    case 2: less.seconds = nullptr; return ds_hf_cpu_adagrad(&less, &adagrad);
    case 3: less.seconds = nullptr; return ds_hf_cpu_sgd(&less, &momentum);
    case 4: less.firsts = less.seconds = nullptr; return ds_hf_cpu_sgd(&less, &plain);
    case 5:
        less.outs = nullptr;
        less.out_type = DS_HF_NONE;
        if (const int32_t status = ds_hf_cpu_lamb_moments(&less, &lamb, norms.data())) return status;
        less = lists;
        less.grads = nullptr;
        less.grad_type = DS_HF_NONE;
        return ds_hf_cpu_lamb_apply(&less, &lamb, norms.data());
    case 6:
        if (const int32_t status = ds_hf_cpu_onebit_values(&less, &onebit)) return status;
        return ds_hf_cpu_onebit_apply(&less, &onebit);
    default: return ds_hf_cpu_squared_norm(&less, &norm);
    }
}

void test_everything() {
    for (int op = 0; op < 8; ++op)
        for (int32_t param : {DS_HF_F32, DS_HF_BF16})
            for (int32_t grad : {DS_HF_F32, DS_HF_BF16, DS_HF_F16})
                for (int32_t moment : {DS_HF_F32, DS_HF_BF16})
                    for (int32_t out : {DS_HF_NONE, DS_HF_F32, DS_HF_BF16, DS_HF_F16})
                        for (int64_t offset : {0, 1, 3}) {
                            Call call(param, grad, moment, out, offset, op == 0 && offset == 3 && out == DS_HF_NONE);
                            call.lists.stochastic = param == DS_HF_BF16 && moment == DS_HF_BF16;
                            call.lists.threads = offset ? 2 : 1;
                            const std::string name = "op " + std::to_string(op);
                            expect(run(op, call.lists) == DS_HF_OK, name + ": status");
                            call.check(name);
                        }
}

void test_adam_is_a_plain_loop() {
    const Call before(DS_HF_F32, DS_HF_BF16, DS_HF_F32, DS_HF_BF16, 1, false);
    const Call after(DS_HF_F32, DS_HF_BF16, DS_HF_F32, DS_HF_BF16, 1, false);
    expect(ds_hf_cpu_adam(&after.lists, &adam) == DS_HF_OK, "status");
    const double c1 = 1 - std::pow(adam.beta1, 3), c2 = 1 - std::pow(adam.beta2, 3);
    for (size_t entry = 0; entry < lengths.size(); ++entry)
        for (int64_t i = 0; i < lengths[entry]; ++i) {
            const double g = 0.5 * before.grads.tensors[entry].get(i);
            const double m = 0.9 * before.firsts.tensors[entry].get(i) + 0.1 * g;
            const double v = 0.99 * before.seconds.tensors[entry].get(i) + 0.01 * g * g;
            const double p = before.params.tensors[entry].get(i) * (1 - adam.lr * adam.weight_decay) -
                             adam.lr / c1 * (m / (std::sqrt(v / c2) + adam.eps));
            expect(std::abs(after.params.tensors[entry].get(i) - p) < 1e-6, "adam: param");
            expect(std::abs(after.firsts.tensors[entry].get(i) - m) < 1e-6, "adam: first moment");
            expect(std::abs(after.seconds.tensors[entry].get(i) - v) < 1e-6, "adam: second moment");
            expect(std::abs(after.outs.tensors[entry].get(i) - p) < 4e-3 * std::abs(p), "adam: out");
        }
}

void test_norm_is_a_plain_sum() {
    const std::vector<int64_t> numels = {5, 0, 300007};
    const Column grads(DS_HF_BF16, numels, 1, 0.25f);
    ds_hf_lists lists = {};
    lists.nbytes = sizeof lists;
    lists.count = 3;
    lists.numels = numels.data();
    lists.grads = const_cast<const void *const *>(grads.list());
    lists.grad_type = DS_HF_BF16;
    double wanted = 0;
    for (size_t entry = 0; entry < numels.size(); ++entry)
        for (int64_t i = 0; i < numels[entry]; ++i) wanted += std::pow(grads.tensors[entry].get(i), 2);
    float first = 0;
    for (int32_t threads : {1, 2, 5}) {
        float norm = 0;
        lists.threads = threads;
        expect(ds_hf_cpu_squared_norm(&lists, &norm) == DS_HF_OK, "status");
        expect(std::abs(norm - wanted) < 1e-5 * wanted, "norm");
        if (threads == 1) first = norm;
        expect(norm == first, "the norm depends on the number of threads");
    }
}

void test_other_layouts_are_refused() {
    Call call(DS_HF_F32, DS_HF_BF16, DS_HF_F32, DS_HF_NONE, 0, false);
    call.lists.nbytes -= 8;
    expect(ds_hf_cpu_adam(&call.lists, &adam) == DS_HF_WRONG_LAYOUT, "a struct of another size");
    call.lists.nbytes += 8;
    call.lists.param_type = 9;
    expect(ds_hf_cpu_adam(&call.lists, &adam) == DS_HF_WRONG_TYPE, "a dtype that does not exist");
}

} // namespace

int main(int argc, char **argv) {
    const char *isa = argc > 1 ? argv[1] : "";
    expect(ds_hf_cpu_abi() == DS_HF_CPU_ABI, "abi");
    expect(ds_hf_cpu_set_isa("none such") != 0, "an unknown instruction set");
    if (ds_hf_cpu_set_isa(isa) != 0) {
        std::printf("this processor has no %s\n", isa);
        return 77;
    }
    expect(*isa == 0 || !std::strcmp(ds_hf_cpu_isa(), isa), "the instruction set in use");
    test_everything();
    test_adam_is_a_plain_loop();
    test_norm_is_a_plain_sum();
    test_other_layouts_are_refused();
    std::printf("%s: %d failures\n", ds_hf_cpu_isa(), failures);
    return failures == 0 ? 0 : 1;
}
