// The functions of ds_hf_aio.h: requests, the blocks they are cut into, and the threads that move these.
//
// Each thread takes as many blocks as it may have in flight: `depth` with a ring, one without. A block that was moved in
// part goes on without O_DIRECT, whose alignment is lost then. Everything is guarded by one lock, which no one holds
// while data moves. No exceptions and no operator new: the library is linked without libstdc++.
#include "ds_hf_aio.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ring.hpp"

namespace {

using ds_hf::Ring;

constexpr int64_t page = 4096;
constexpr int32_t most_threads = 32;

struct Request {
    int64_t id;
    bool write, over;
    char *memory;
    int64_t nbytes, offset;
    int64_t direct_nbytes; // of the front; what follows goes through the page cache
    int direct_fd, plain_fd;
    bool own_fd;
    int64_t issued, moved, in_flight; // bytes, bytes, blocks
    int32_t stage, error;
    Request *next; // of those with blocks to issue
    Request *next_known;
};

struct Block {
    Request *request;
    int64_t start, nbytes; // what is left of it
    int fd;
};

} // namespace

struct ds_hf_aio {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    ds_hf_aio_options options;
    Request *head, *tail; // with blocks to issue
    Request *known;       // every request until it is waited for
    int64_t last_id;
    bool closing, uring;
    pthread_t *threads;
    int32_t wanted, started;
};

namespace {

void close_files(Request *request) {
    if (request->direct_fd >= 0) close(request->direct_fd);
    if (request->own_fd && request->plain_fd >= 0) close(request->plain_fd);
    request->direct_fd = request->plain_fd = -1;
}

void end_if_over(ds_hf_aio *aio, Request *request) {
    if (request->in_flight > 0 || request->issued < request->nbytes) return;
    close_files(request);
    request->over = true;
    pthread_cond_broadcast(&aio->done);
}

void fail(Request *request, int32_t stage, int32_t error) {
    if (request->stage == DS_HF_AIO_OK) {
        request->stage = stage;
        request->error = error;
    }
    request->issued = request->nbytes; // the rest is not begun
}

// Takes a block to move, with the lock held; false if there is none.
bool take(ds_hf_aio *aio, Block *block) {
    while (aio->head != nullptr && aio->head->issued >= aio->head->nbytes) {
        aio->head = aio->head->next; // failed, or all of it is issued
        if (aio->head == nullptr) aio->tail = nullptr;
    }
    Request *request = aio->head;
    if (request == nullptr) return false;
    const bool direct = request->issued < request->direct_nbytes;
    const int64_t end = direct ? request->direct_nbytes : request->nbytes;
    const int64_t left = end - request->issued;
    *block = {request, request->issued, left < aio->options.block ? left : aio->options.block,
              direct ? request->direct_fd : request->plain_fd};
    request->issued += block->nbytes;
    ++request->in_flight;
    return true;
}

// What became of a block, with the lock held: true if the rest of it must be moved again.
bool settle(ds_hf_aio *aio, Block *block, int64_t result) {
    Request *request = block->request;
    if (result == -EINTR || result == -EAGAIN) return true;
    if (result == -EINVAL && block->fd == request->direct_fd && request->direct_fd >= 0) {
        block->fd = request->plain_fd; // a file system that opens files for O_DIRECT and then refuses it
        return true;
    }
    if (result > 0) {
        request->moved += result;
        block->start += result;
        block->nbytes -= result;
        block->fd = request->plain_fd;
        if (block->nbytes > 0) return true;
    } else if (result == 0) {
        fail(request, request->write ? DS_HF_AIO_TRANSFER : DS_HF_AIO_SHORT, request->write ? ENOSPC : 0);
    } else {
        fail(request, DS_HF_AIO_TRANSFER, static_cast<int32_t>(-result));
    }
    --request->in_flight;
    end_if_over(aio, request);
    return false;
}

int64_t move_now(const Block &block) {
    const Request *request = block.request;
    char *memory = request->memory + block.start;
    const auto nbytes = static_cast<size_t>(block.nbytes);
    const int64_t offset = request->offset + block.start;
    const ssize_t moved =
        request->write ? pwrite(block.fd, memory, nbytes, offset) : pread(block.fd, memory, nbytes, offset);
    return moved < 0 ? -errno : moved;
}

void run_plain(ds_hf_aio *aio) {
    Block block;
    pthread_mutex_lock(&aio->lock);
    for (;;) {
        while (!take(aio, &block)) {
            if (aio->closing) return void(pthread_mutex_unlock(&aio->lock));
            pthread_cond_wait(&aio->work, &aio->lock);
        }
        for (bool again = true; again;) {
            pthread_mutex_unlock(&aio->lock);
            const int64_t result = move_now(block);
            pthread_mutex_lock(&aio->lock);
            again = settle(aio, &block, result);
        }
    }
}

void queue(Ring *ring, const Block &block, uint64_t tag) {
    const Request *request = block.request;
    ring->add(request->write, block.fd, request->memory + block.start, static_cast<unsigned>(block.nbytes),
              request->offset + block.start, tag);
}

// The kernel may go on to write into memory that will belong to something else: nothing is safe any more.
[[noreturn]] void give_up(int error) {
    char text[] = "ds_hf: io_uring_enter failed with errno 000, the process ends\n";
    char *digits = strstr(text, "000");
    for (int place = 2; place >= 0; --place, error /= 10) digits[place] = static_cast<char>('0' + error % 10);
    if (write(2, text, sizeof text - 1) < 0) _exit(1);
    abort();
}

// `blocks[i].request` is null where the place is free.
void run_ring(ds_hf_aio *aio, Ring *ring, Block *blocks, int32_t depth) {
    int32_t in_flight = 0;
    pthread_mutex_lock(&aio->lock);
    for (;;) {
        for (int32_t place = 0; place < depth && in_flight < depth; ++place) {
            if (blocks[place].request != nullptr) continue;
            if (!take(aio, &blocks[place])) {
                blocks[place].request = nullptr;
                break;
            }
            queue(ring, blocks[place], static_cast<uint64_t>(place));
            ++in_flight;
        }
        if (in_flight == 0) {
            if (aio->closing) return void(pthread_mutex_unlock(&aio->lock));
            pthread_cond_wait(&aio->work, &aio->lock);
            continue;
        }
        pthread_mutex_unlock(&aio->lock);
        const int error = ring->enter();
        pthread_mutex_lock(&aio->lock);
        if (error != 0) give_up(error);
        uint64_t tag;
        for (int result; ring->next(&tag, &result);) {
            if (settle(aio, &blocks[tag], result)) {
                queue(ring, blocks[tag], tag);
            } else {
                blocks[tag].request = nullptr;
                --in_flight;
            }
        }
    }
}

void *run(void *opaque) {
    auto *aio = static_cast<ds_hf_aio *>(opaque);
    const int32_t depth = aio->options.depth;
    Ring ring;
    Block *blocks = nullptr;
    if (aio->uring && ring.open(static_cast<unsigned>(depth))) {
        blocks = static_cast<Block *>(calloc(static_cast<size_t>(depth), sizeof(Block)));
        if (blocks != nullptr) run_ring(aio, &ring, blocks, depth);
        ring.close();
    }
    if (blocks == nullptr) run_plain(aio);
    free(blocks);
    return nullptr;
}

bool has_uring() {
    Ring ring;
    if (!ring.open(1)) return false;
    ring.close();
    return true;
}

bool aligned(int64_t value) { return value % page == 0; }

void open_files(const ds_hf_aio *aio, Request *request, const char *path, int32_t fd) {
    const int flags = (request->write ? O_WRONLY | O_CREAT : O_RDONLY) | O_CLOEXEC;
    request->own_fd = path != nullptr;
    request->plain_fd = path != nullptr ? open(path, flags, 0600) : fd;
    if (request->plain_fd < 0) return fail(request, DS_HF_AIO_OPEN, path != nullptr ? errno : EBADF);
#ifdef O_DIRECT
    const bool fits = aligned(static_cast<int64_t>(reinterpret_cast<intptr_t>(request->memory))) &&
                      aligned(request->offset) && request->nbytes >= page;
    if (path != nullptr && aio->options.direct && fits) request->direct_fd = open(path, flags | O_DIRECT, 0600);
#endif
    if (request->direct_fd >= 0) request->direct_nbytes = request->nbytes / page * page;
}

Request *find(ds_hf_aio *aio, int64_t id) {
    Request *request = aio->known;
    while (request != nullptr && request->id != id) request = request->next_known;
    return request;
}

void forget(ds_hf_aio *aio, Request *request) {
    Request **place = &aio->known;
    while (*place != request) place = &(*place)->next_known;
    *place = request->next_known;
    free(request);
}

// A request whose issued blocks reached the end of it may still stand in the list of those with blocks to issue.
void drop_issued(ds_hf_aio *aio) {
    Request **place = &aio->head;
    aio->tail = nullptr;
    while (*place != nullptr) {
        if ((*place)->issued >= (*place)->nbytes) {
            *place = (*place)->next;
        } else {
            aio->tail = *place;
            place = &(*place)->next;
        }
    }
}

} // namespace

extern "C" {

int32_t ds_hf_aio_abi(void) { return DS_HF_AIO_ABI; }

struct ds_hf_aio *ds_hf_aio_open(const struct ds_hf_aio_options *options) {
    errno = EINVAL;
    if (options->nbytes != sizeof *options || options->depth < 1 || options->threads < 1 || options->block < 1)
        return nullptr;
    auto *aio = static_cast<ds_hf_aio *>(calloc(1, sizeof(ds_hf_aio)));
    if (aio == nullptr) return nullptr;
    aio->options = *options;
    aio->options.block = (options->block + page - 1) / page * page;
    if (aio->options.block > (1 << 30)) aio->options.block = 1 << 30;
    if (aio->options.depth > 1024) aio->options.depth = 1024;
    aio->uring = options->engine != DS_HF_AIO_THREADS && has_uring();
    // a thread without a ring has one block in flight
    aio->wanted = aio->uring ? options->threads : options->threads * aio->options.depth;
    if (!aio->uring && aio->wanted > most_threads) aio->wanted = most_threads;
    pthread_mutex_init(&aio->lock, nullptr);
    pthread_cond_init(&aio->work, nullptr);
    pthread_cond_init(&aio->done, nullptr);
    aio->threads = static_cast<pthread_t *>(calloc(static_cast<size_t>(aio->wanted), sizeof(pthread_t)));
    while (aio->threads != nullptr && aio->started < aio->wanted) {
        const int error = pthread_create(aio->threads + aio->started, nullptr, run, aio);
        if (error != 0) {
            ds_hf_aio_close(aio);
            errno = error;
            return nullptr;
        }
        ++aio->started;
    }
    return aio;
}

int32_t ds_hf_aio_uses_uring(const struct ds_hf_aio *aio) { return aio->uring; }

int64_t ds_hf_aio_submit(struct ds_hf_aio *aio, int32_t write, const char *path, int32_t fd, void *memory,
                         int64_t nbytes, int64_t offset) {
    auto *request = static_cast<Request *>(calloc(1, sizeof(Request)));
    if (request == nullptr) return 0;
    request->write = write != 0;
    request->memory = static_cast<char *>(memory);
    request->nbytes = nbytes;
    request->offset = offset;
    request->direct_fd = request->plain_fd = -1;
    open_files(aio, request, path, fd);
    pthread_mutex_lock(&aio->lock);
    const int64_t id = request->id = ++aio->last_id;
    request->next_known = aio->known;
    aio->known = request;
    if (request->issued >= nbytes) {
        end_if_over(aio, request);
    } else {
        if (aio->tail != nullptr) aio->tail->next = request;
        else aio->head = request;
        aio->tail = request;
        pthread_cond_broadcast(&aio->work);
    }
    pthread_mutex_unlock(&aio->lock);
    return id;
}

int32_t ds_hf_aio_done(struct ds_hf_aio *aio, int64_t id) {
    pthread_mutex_lock(&aio->lock);
    const Request *request = find(aio, id);
    const bool over = request == nullptr || request->over;
    pthread_mutex_unlock(&aio->lock);
    return over;
}

int32_t ds_hf_aio_wait(struct ds_hf_aio *aio, int64_t id, struct ds_hf_aio_result *result) {
    memset(result, 0, sizeof *result);
    pthread_mutex_lock(&aio->lock);
    Request *request = find(aio, id);
    if (request == nullptr) {
        result->stage = DS_HF_AIO_TRANSFER;
        result->error = EINVAL;
    } else {
        while (!request->over) pthread_cond_wait(&aio->done, &aio->lock);
        *result = {request->moved, request->stage, request->error, request->direct_nbytes > 0, 0};
        drop_issued(aio);
        forget(aio, request);
    }
    pthread_mutex_unlock(&aio->lock);
    return result->stage;
}

void ds_hf_aio_close(struct ds_hf_aio *aio) {
    pthread_mutex_lock(&aio->lock);
    aio->closing = true;
    pthread_cond_broadcast(&aio->work);
    pthread_mutex_unlock(&aio->lock);
    for (int32_t index = 0; index < aio->started; ++index) pthread_join(aio->threads[index], nullptr);
    drop_issued(aio);
    while (aio->known != nullptr) forget(aio, aio->known);
    pthread_cond_destroy(&aio->done);
    pthread_cond_destroy(&aio->work);
    pthread_mutex_destroy(&aio->lock);
    free(aio->threads);
    free(aio);
}

} // extern "C"
