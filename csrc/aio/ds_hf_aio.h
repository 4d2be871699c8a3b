/* The C interface of asynchronous reading and writing: what ds_hf/engine/offload/aio.py mirrors with ctypes.
 *
 * A request moves one stretch of memory to or from one file, in blocks, several at a time. Where memory, offset and the
 * file system allow it, O_DIRECT is used for all but a tail that is no multiple of 4096 bytes.
 */
#ifndef DS_HF_AIO_H
#define DS_HF_AIO_H

#include <stdint.h>

#define DS_HF_AIO_ABI 1 /* goes up with every change of this file */
#define DS_HF_AIO_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

struct ds_hf_aio; /* a queue and its threads; not to be used in a forked child */

enum ds_hf_aio_stage { DS_HF_AIO_OK = 0, DS_HF_AIO_OPEN = 1, DS_HF_AIO_TRANSFER = 2, DS_HF_AIO_SHORT = 3 };
enum ds_hf_aio_engine { DS_HF_AIO_BEST = 0, DS_HF_AIO_THREADS = 1, DS_HF_AIO_URING = 2 };

struct ds_hf_aio_options {
    int64_t nbytes; /* sizeof(struct ds_hf_aio_options), as the caller sees it */
    int64_t block;  /* bytes of a block; rounded up to 4096 */
    int32_t depth;  /* blocks in flight, for each thread */
    int32_t threads;
    int32_t engine;
    int32_t direct; /* 0: never O_DIRECT */
};

struct ds_hf_aio_result {
    int64_t moved;  /* bytes */
    int32_t stage;  /* ds_hf_aio_stage: where it failed */
    int32_t error;  /* errno */
    int32_t direct; /* whether O_DIRECT was used */
    int32_t pad;
};

DS_HF_AIO_EXPORT int32_t ds_hf_aio_abi(void);

/* Null, and errno, if there are no threads or no memory. io_uring gives way to threads where the kernel has none. */
DS_HF_AIO_EXPORT struct ds_hf_aio *ds_hf_aio_open(const struct ds_hf_aio_options *options);

/* Whether the queue uses io_uring. */
DS_HF_AIO_EXPORT int32_t ds_hf_aio_uses_uring(const struct ds_hf_aio *aio);

/* Begin a request; the memory must stay. Either `path` (made if it is to be written) or, with a null path, `fd`.
 * Returns a number for wait, or 0 without memory. */
DS_HF_AIO_EXPORT int64_t ds_hf_aio_submit(struct ds_hf_aio *aio, int32_t write, const char *path, int32_t fd,
                                          void *memory, int64_t nbytes, int64_t offset);

/* Whether a request is over. */
DS_HF_AIO_EXPORT int32_t ds_hf_aio_done(struct ds_hf_aio *aio, int64_t request);

/* Wait for a request and forget it; its stage. */
DS_HF_AIO_EXPORT int32_t ds_hf_aio_wait(struct ds_hf_aio *aio, int64_t request, struct ds_hf_aio_result *result);

/* Finish every request, end the threads. */
DS_HF_AIO_EXPORT void ds_hf_aio_close(struct ds_hf_aio *aio);

#ifdef __cplusplus
}
#endif

#endif
