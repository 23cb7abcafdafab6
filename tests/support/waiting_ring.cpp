// mlx's ring polls its sockets without a pause, so that a rank that waits takes a whole core. Loaded before libc
// (`tests.support.rank_process`), this recv waits a moment for data before it says that there is none.

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <cstddef>

extern "C" ssize_t recv(int socket, void* buffer, std::size_t size, int flags) {
  using Receive = ssize_t (*)(int, void*, std::size_t, int);
  static const Receive receive = reinterpret_cast<Receive>(dlsym(RTLD_NEXT, "recv"));
  const ssize_t received = receive(socket, buffer, size, flags);
  if (received < 0 && errno == EAGAIN) {
    pollfd readable{socket, POLLIN, 0};
    const timespec pause{0, 200'000};  // short: the same thread also sends
    ppoll(&readable, 1, &pause, nullptr);
    errno = EAGAIN;
  }
  return received;
}
