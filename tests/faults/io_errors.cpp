// Calls that change a file under some folder, made to fail: LD_PRELOAD this, then io_errors_arm.
//
// From the at-th such call on (0: the first) one fails, or all do, with the errno given: ENOSPC spares what frees room.
// 0 instead of an errno: it writes half of what it was to. -N: the signal N comes before it. Linux, glibc.
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

char folder[PATH_MAX];
size_t folder_length = 0;  // 0: nothing fails
long fails_at = 0;
int fails_with = 0;
bool fails_for_good = false;
std::atomic<long> calls{0};

template <class F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

bool under(const char* path) {
  return strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || path[folder_length] == '\0');
}

bool fd_under(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0) return false;
  path[length] = '\0';
  return under(path);
}

bool path_under(int directory, const char* path) {
  if (path == nullptr) return false;
  if (path[0] == '/') return under(path);
  if (directory != AT_FDCWD) return fd_under(directory);
  char here[PATH_MAX];
  return getcwd(here, sizeof here) != nullptr && under(here);
}

// Counts a call; whether it is one that does not come to what it should.
bool counted(bool frees_room) {
  const long number = calls++;
  if (number < fails_at || (number > fails_at && !fails_for_good) || (frees_room && fails_with == ENOSPC)) return false;
  if (fails_with < 0) {
    kill(getpid(), -fails_with);
    return false;
  }
  errno = fails_with;
  return true;
}

bool fails(int fd, bool frees_room = false) {
  return folder_length != 0 && fd_under(fd) && counted(frees_room) && fails_with != 0;
}
bool fails(int directory, const char* path, bool frees_room = false) {
  return folder_length != 0 && path_under(directory, path) && counted(frees_room) && fails_with != 0;
}
bool falls_short(int fd) { return folder_length != 0 && fd_under(fd) && counted(false); }

bool changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) != 0; }

mode_t mode_of(int flags, va_list& arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

extern "C" {

void io_errors_arm(const char* under_path, long at, int error, int for_good) {
  snprintf(folder, sizeof folder, "%s", under_path);
  fails_at = at;
  fails_with = error;
  fails_for_good = for_good != 0;
  calls = 0;
  folder_length = strlen(folder);
}

long io_errors_calls() { return calls; }

#define OPEN(name)                                                                     \
  int name(const char* path, int flags, ...) {                                         \
    va_list arguments;                                                                 \
    va_start(arguments, flags);                                                        \
    const mode_t mode = mode_of(flags, arguments);                                     \
    va_end(arguments);                                                                 \
    if (changes(flags) && fails(AT_FDCWD, path)) return -1;                            \
    static const auto real = next<int (*)(const char*, int, ...)>(#name);              \
    return real(path, flags, mode);                                                    \
  }
#define OPENAT(name)                                                                   \
  int name(int directory, const char* path, int flags, ...) {                          \
    va_list arguments;                                                                 \
    va_start(arguments, flags);                                                        \
    const mode_t mode = mode_of(flags, arguments);                                     \
    va_end(arguments);                                                                 \
    if (changes(flags) && fails(directory, path)) return -1;                           \
    static const auto real = next<int (*)(int, const char*, int, ...)>(#name);         \
    return real(directory, path, flags, mode);                                         \
  }
// Of n bytes, or n buffers.
#define WRITE(name, parameters, types, ...)                                            \
  ssize_t name parameters {                                                            \
    if (falls_short(fd)) {                                                             \
      if (fails_with != 0) return -1;                                                  \
      n = (n + 1) / 2;                                                                 \
    }                                                                                  \
    static const auto real = next<ssize_t(*) types>(#name);                            \
    return real(__VA_ARGS__);                                                          \
  }
// A call on a descriptor, its first argument, or on paths.
#define ON_FD(result, name, frees, parameters, types, ...)                             \
  result name parameters {                                                             \
    if (fails(fd, frees)) return -1;                                                   \
    static const auto real = next<result(*) types>(#name);                             \
    return real(__VA_ARGS__);                                                          \
  }
#define ON_PATH(name, directory, path, frees, parameters, types, ...)                  \
  int name parameters {                                                                \
    if (fails(directory, path, frees)) return -1;                                      \
    static const auto real = next<int(*) types>(#name);                                \
    return real(__VA_ARGS__);                                                          \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

using Vectors = const struct iovec*;
WRITE(write, (int fd, const void* data, size_t n), (int, const void*, size_t), fd, data, n)
WRITE(pwrite, (int fd, const void* data, size_t n, off_t at), (int, const void*, size_t, off_t), fd, data, n, at)
WRITE(pwrite64, (int fd, const void* data, size_t n, off64_t at), (int, const void*, size_t, off64_t), fd, data, n, at)
WRITE(writev, (int fd, Vectors data, int n), (int, Vectors, int), fd, data, n)
ON_FD(int, fsync, false, (int fd), (int), fd)
ON_FD(int, fdatasync, false, (int fd), (int), fd)
ON_FD(int, ftruncate, true, (int fd, off_t n) noexcept, (int, off_t), fd, n)
ON_FD(int, ftruncate64, true, (int fd, off64_t n) noexcept, (int, off64_t), fd, n)
ON_FD(int, fallocate64, false, (int fd, int mode, off64_t at, off64_t n), (int, int, off64_t, off64_t), fd, mode, at, n)
ON_FD(int, fchmod, true, (int fd, mode_t mode) noexcept, (int, mode_t), fd, mode)

ON_PATH(rename, AT_FDCWD, to, false, (const char* from, const char* to) noexcept, (const char*, const char*), from, to)
ON_PATH(renameat, there, to, false, (int here, const char* from, int there, const char* to) noexcept,
        (int, const char*, int, const char*), here, from, there, to)
ON_PATH(link, AT_FDCWD, to, false, (const char* from, const char* to) noexcept, (const char*, const char*), from, to)
ON_PATH(symlink, AT_FDCWD, to, false, (const char* from, const char* to) noexcept, (const char*, const char*), from, to)
ON_PATH(mkdir, AT_FDCWD, path, false, (const char* path, mode_t mode) noexcept, (const char*, mode_t), path, mode)
ON_PATH(mkdirat, at, path, false, (int at, const char* path, mode_t mode) noexcept, (int, const char*, mode_t), at, path, mode)
ON_PATH(unlink, AT_FDCWD, path, true, (const char* path) noexcept, (const char*), path)
ON_PATH(unlinkat, at, path, true, (int at, const char* path, int flags) noexcept, (int, const char*, int), at, path, flags)
ON_PATH(rmdir, AT_FDCWD, path, true, (const char* path) noexcept, (const char*), path)

}  // extern "C"
