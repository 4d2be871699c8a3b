#include "ring.hpp"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#endif

// 5.6 brought the operations used here; headers older than that do not have the probe either.
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_SINGLE_MMAP) && defined(IO_URING_OP_SUPPORTED)

namespace ds_hf {

namespace {
constexpr unsigned probe_ops = 64;
} // namespace

bool Ring::open(unsigned entries) {
    io_uring_params params;
    memset(&params, 0, sizeof params);
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (fd_ < 0) return false;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !can_read_and_write() || !map(&params)) {
        close();
        return false;
    }
    return true;
}

bool Ring::can_read_and_write() {
    const size_t nbytes = sizeof(io_uring_probe) + probe_ops * sizeof(io_uring_probe_op);
    auto *probe = static_cast<io_uring_probe *>(calloc(1, nbytes));
    if (probe == nullptr) return false;
    const bool asked = syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, probe_ops) >= 0;
    const bool has = asked && probe->last_op >= IORING_OP_WRITE &&
                     (probe->ops[IORING_OP_READ].flags & probe->ops[IORING_OP_WRITE].flags & IO_URING_OP_SUPPORTED);
    free(probe);
    return has;
}

bool Ring::map(const void *opaque) {
    const auto &params = *static_cast<const io_uring_params *>(opaque);
    const uint64_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const uint64_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_nbytes_ = sq > cq ? sq : cq;
    sqes_nbytes_ = params.sq_entries * sizeof(io_uring_sqe);
    constexpr int protection = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    void *rings = mmap(nullptr, rings_nbytes_, protection, flags, fd_, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED) return false;
    rings_ = rings;
    void *sqes = mmap(nullptr, sqes_nbytes_, protection, flags, fd_, IORING_OFF_SQES);
    if (sqes == MAP_FAILED) return false;
    sqes_ = static_cast<io_uring_sqe *>(sqes);
    auto *base = static_cast<char *>(rings_);
    const auto at = [base](unsigned offset) { return reinterpret_cast<unsigned *>(base + offset); };
    sq_tail_ = at(params.sq_off.tail);
    sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    sq_mask_ = *at(params.sq_off.ring_mask);
    cq_mask_ = *at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe *>(base + params.cq_off.cqes);
    return true;
}

void Ring::close() {
    if (sqes_ != nullptr) munmap(sqes_, sqes_nbytes_);
    if (rings_ != nullptr) munmap(rings_, rings_nbytes_);
    if (fd_ >= 0) ::close(fd_);
    sqes_ = nullptr;
    rings_ = nullptr;
    fd_ = -1;
}

void Ring::add(bool write, int fd, void *memory, unsigned nbytes, int64_t offset, uint64_t tag) {
    const unsigned tail = *sq_tail_, index = tail & sq_mask_;
    io_uring_sqe *sqe = sqes_ + index;
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = static_cast<uint8_t>(write ? IORING_OP_WRITE : IORING_OP_READ);
    sqe->fd = fd;
    sqe->addr = reinterpret_cast<uint64_t>(memory);
    sqe->len = nbytes;
    sqe->off = static_cast<uint64_t>(offset);
    sqe->user_data = tag;
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++added_;
}

int Ring::enter() {
    for (;;) {
        const long taken = syscall(__NR_io_uring_enter, fd_, added_, 1u, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken >= 0) {
            added_ -= static_cast<unsigned>(taken);
            return 0;
        }
        if (errno != EINTR && errno != EAGAIN && errno != EBUSY) return errno;
    }
}

bool Ring::next(uint64_t *tag, int *result) {
    const unsigned head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe &cqe = cqes_[head & cq_mask_];
    *tag = cqe.user_data;
    *result = cqe.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

} // namespace ds_hf

#else

namespace ds_hf {

bool Ring::open(unsigned) { return false; }
void Ring::close() {}
void Ring::add(bool, int, void *, unsigned, int64_t, uint64_t) {}
int Ring::enter() { return ENOSYS; }
bool Ring::next(uint64_t *, int *) { return false; }

} // namespace ds_hf

#endif
