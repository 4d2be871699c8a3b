// io_uring by its three system calls: a library for it is not on every system, and of it this little is needed.
#pragma once

#include <stdint.h>

struct io_uring_sqe;
struct io_uring_cqe;

namespace ds_hf {

// One ring, used by one thread.
class Ring {
  public:
    // False where the kernel, or whoever guards it, has no io_uring that reads and writes.
    bool open(unsigned entries);
    void close();

    // Queue a transfer; never more than `entries` may be in flight. `tag` comes back with the result.
    void add(bool write, int fd, void *memory, unsigned nbytes, int64_t offset, uint64_t tag);

    // Hand over what was added and wait for one result at least; 0 or an errno.
    int enter();

    // The next result: bytes, or a negative errno. False if there is none.
    bool next(uint64_t *tag, int *result);

  private:
    bool map(const void *params);
    bool can_read_and_write();

    int fd_ = -1;
    unsigned added_ = 0;
    void *rings_ = nullptr;
    uint64_t rings_nbytes_ = 0, sqes_nbytes_ = 0;
    io_uring_sqe *sqes_ = nullptr;
    io_uring_cqe *cqes_ = nullptr;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
};

} // namespace ds_hf
