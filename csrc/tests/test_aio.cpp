// Reads and writes of every alignment and length with each engine, several at once, and the faults, for the sanitizers'
// sake: ctest builds this with them. The first argument is the engine, the second a folder to write in.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "ds_hf_aio.h"

namespace {

int failures = 0;

void expect(bool holds, const std::string &what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    ++failures;
}

ds_hf_aio_options options_for(const std::string &engine) {
    ds_hf_aio_options options = {};
    options.nbytes = sizeof options;
    options.block = 8192;
    options.depth = 3;
    options.threads = 2;
    options.engine = engine == "uring" ? DS_HF_AIO_URING : DS_HF_AIO_THREADS;
    options.direct = engine != "plain";
    return options;
}

ds_hf_aio_result move(ds_hf_aio *aio, bool write, const std::string &path, void *memory, int64_t nbytes, int64_t offset) {
    ds_hf_aio_result result;
    const int64_t id = ds_hf_aio_submit(aio, write, path.c_str(), -1, memory, nbytes, offset);
    expect(id > 0, "submit");
    ds_hf_aio_wait(aio, id, &result);
    expect(ds_hf_aio_done(aio, id), "a request that was waited for is done");
    return result;
}

void check_lengths(ds_hf_aio *aio, const std::string &path) {
    for (const int64_t nbytes : {0, 1, 4095, 4096, 4097, 8192, 100000, 1 << 20}) {
        for (const int64_t shift : {0, 1, 512}) {
            for (const int64_t offset : {0, 3, 4096}) {
                std::remove(path.c_str());
                auto *memory = static_cast<char *>(aligned_alloc(4096, 2 << 20));
                for (int64_t i = 0; i < nbytes; ++i) memory[shift + i] = static_cast<char>(i * 31 + i / 4096);
                ds_hf_aio_result result = move(aio, true, path, memory + shift, nbytes, offset);
                expect(result.stage == DS_HF_AIO_OK && result.moved == nbytes, "write of " + std::to_string(nbytes));
                std::vector<char> expected(memory + shift, memory + shift + nbytes);
                std::memset(memory, 0, 2 << 20);
                result = move(aio, false, path, memory + shift, nbytes, offset);
                expect(result.stage == DS_HF_AIO_OK && result.moved == nbytes, "read of " + std::to_string(nbytes));
                expect(nbytes == 0 || std::memcmp(memory + shift, expected.data(), expected.size()) == 0,
                       "values of " + std::to_string(nbytes) + " bytes at " + std::to_string(shift));
                std::free(memory);
            }
        }
    }
}

void check_many(ds_hf_aio *aio, const std::string &path) {
    constexpr int64_t count = 12, nbytes = 5 * 8192 + 4096;
    auto *memory = static_cast<char *>(aligned_alloc(4096, count * nbytes));
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < count; ++i) {
        std::memset(memory + i * nbytes, static_cast<int>(i + 1), nbytes);
        const std::string own = path + std::to_string(i % 3);
        ids.push_back(ds_hf_aio_submit(aio, 1, own.c_str(), -1, memory + i * nbytes, nbytes, i / 3 * nbytes));
    }
    ds_hf_aio_result result;
    for (auto id = ids.rbegin(); id != ids.rend(); ++id) expect(ds_hf_aio_wait(aio, *id, &result) == 0, "many writes");
    std::memset(memory, 0, count * nbytes);
    ids.clear();
    for (int64_t i = 0; i < count; ++i) {
        const std::string own = path + std::to_string(i % 3);
        ids.push_back(ds_hf_aio_submit(aio, 0, own.c_str(), -1, memory + i * nbytes, nbytes, i / 3 * nbytes));
    }
    for (const int64_t id : ids) expect(ds_hf_aio_wait(aio, id, &result) == 0, "many reads");
    for (int64_t i = 0; i < count; ++i)
        expect(memory[i * nbytes] == i + 1 && memory[(i + 1) * nbytes - 1] == i + 1, "values of many");
    std::free(memory);
}

void check_faults(ds_hf_aio *aio, const std::string &path) {
    auto *memory = static_cast<char *>(aligned_alloc(4096, 65536));
    std::memset(memory, 1, 65536);
    expect(move(aio, false, path + ".absent", memory, 4096, 0).stage == DS_HF_AIO_OPEN, "a missing file");
    std::remove(path.c_str());
    expect(move(aio, true, path, memory, 20000, 0).stage == DS_HF_AIO_OK, "a short file");
    const ds_hf_aio_result half = move(aio, false, path, memory, 65536, 0);
    expect(half.stage == DS_HF_AIO_SHORT, "a short read");
    expect(half.moved <= 20000, "a short read moves no more than there is");
    const rlimit limit = {32768, RLIM_INFINITY};
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    const ds_hf_aio_result full = move(aio, true, path, memory, 65536, 0);
    expect(full.stage == DS_HF_AIO_TRANSFER && full.error != 0, "a file that may not grow");
    setrlimit(RLIMIT_FSIZE, &before);
    ds_hf_aio_result result;
    expect(ds_hf_aio_wait(aio, 1 << 30, &result) != 0, "a request that does not exist");
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT, 0600);
    const int64_t id = ds_hf_aio_submit(aio, 1, nullptr, fd, memory, 5000, 7);
    expect(ds_hf_aio_wait(aio, id, &result) == 0 && result.moved == 5000, "a file that is open already");
    expect(close(fd) == 0, "it stays open");
    std::free(memory);
}

} // namespace

int main(int argc, char **argv) {
    const std::string engine = argc > 1 ? argv[1] : "threads", folder = argc > 2 ? argv[2] : "/tmp";
    const std::string path = folder + "/aio_" + engine + "_" + std::to_string(getpid());
    ds_hf_aio_options options = options_for(engine);
    options.nbytes = 1;
    expect(ds_hf_aio_open(&options) == nullptr, "a struct of another layout");
    options.nbytes = sizeof options;
    ds_hf_aio *aio = ds_hf_aio_open(&options);
    if (aio == nullptr) return 1;
    if (engine == "uring" && !ds_hf_aio_uses_uring(aio)) {
        ds_hf_aio_close(aio);
        return 77;
    }
    check_lengths(aio, path);
    check_many(aio, path);
    check_faults(aio, path);
    auto *memory = static_cast<char *>(aligned_alloc(4096, 1 << 20));
    std::memset(memory, 2, 1 << 20);
    ds_hf_aio_submit(aio, 1, path.c_str(), -1, memory, 1 << 20, 0); // closing finishes it
    ds_hf_aio_close(aio);
    struct stat status;
    expect(stat(path.c_str(), &status) == 0 && status.st_size >= 1 << 20, "what was begun is done");
    std::free(memory);
    std::remove(path.c_str());
    for (int i = 0; i < 3; ++i) std::remove((path + std::to_string(i)).c_str());
    return failures == 0 ? 0 : 1;
}
