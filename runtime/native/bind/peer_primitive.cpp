// Collectives of two ranks: the graph node, and the exchange over a socket (peer_primitive.h).
#include "peer_primitive.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../core/pause.h"
#include "../core/scratch.h"
#include "mlx/backend/cpu/encoder.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

constexpr int kLooks = 50;    // at the socket, of half a microsecond each
constexpr int kYields = 150;  // more, that let other threads run, where both ranks are at the same place; then sleep

// Bytes moved by one call of send or recv; 0 if none can be moved now.
size_t moved(ssize_t result) {
  if (result > 0) return static_cast<size_t>(result);
  if (result == 0) throw std::runtime_error("the other rank has closed the connection");
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  throw std::runtime_error(std::string("the connection to the other rank is lost: ") + std::strerror(errno));
}

template <class T>
void add_to(const char* from, size_t bytes, char* to) {
  const auto* x = reinterpret_cast<const T*>(from);
  auto* sum = reinterpret_cast<T*>(to);
  for (size_t i = 0; i < bytes / sizeof(T); ++i) sum[i] += x[i];
}

enum class Collective { sum, gather, columns, send, receive };

class PeerNode : public Node {
 public:
  PeerNode(mx::Stream stream, std::shared_ptr<Peer> peer, Collective collective)
      : Node(stream), peer_(std::move(peer)), collective_(collective) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    if (collective_ == Collective::send) {
      out.copy_shared_buffer(inputs[0]);
    } else {
      out.set_data(allocated(out.nbytes()));
    }
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (collective_ == Collective::receive) {
      encoder.dispatch([peer = peer_, to = out.data<char>(), bytes = out.nbytes()] { peer->exchange(nullptr, 0, to, bytes); });
      return;
    }
    // Other collectives have no rows: an array may have no axis, or an empty one.
    const size_t rows_of_out = collective_ == Collective::columns ? out.size() / static_cast<size_t>(out.shape(-1)) : 0;
    encoder.dispatch([peer = peer_, collective = collective_, rows = Rows(inputs[0]), bytes = inputs[0].nbytes(),
                      floats = out.dtype() == mx::float32, to = out.data<char>(), of_out = out.nbytes(), rows_of_out] {
      std::vector<char> copy;
      const char* own = rows.read<char>(copy);
      if (collective == Collective::send) {
        peer->exchange(own, bytes, nullptr, 0);
      } else if (collective == Collective::columns) {
        const size_t from_other = of_out - bytes, mine = bytes / rows_of_out, theirs = from_other / rows_of_out;
        auto* others = reinterpret_cast<char*>(scratch(Slot::received, static_cast<int64_t>(from_other / sizeof(float) + 1)));
        peer->exchange(nullptr, 0, others, from_other);
        for (size_t i = 0; i < rows_of_out; ++i) {
          std::memcpy(to + i * (mine + theirs), own + i * mine, mine);
          std::memcpy(to + i * (mine + theirs) + mine, others + i * theirs, theirs);
        }
      } else if (collective == Collective::gather) {
        std::memcpy(to + static_cast<size_t>(peer->rank()) * bytes, own, bytes);
        peer->exchange(own, bytes, to + static_cast<size_t>(1 - peer->rank()) * bytes, bytes);
      } else {
        peer->exchange(own, bytes, to, bytes);
        floats ? add_to<float>(own, bytes, to) : add_to<uint32_t>(own, bytes, to);
      }
    });
  }

  const char* name() const override { return "HeadracePeer"; }

 private:
  std::shared_ptr<Peer> peer_;
  Collective collective_;
};

}  // namespace

Peer::~Peer() { close(socket_); }

void Peer::exchange(const char* sent, size_t to_send, char* received, size_t to_receive) {
  const int most = to_send > 0 ? kLooks + kYields : kLooks;  // a rank that only receives waits for a computation
  for (int looks = 0; to_send > 0 || to_receive > 0; ++looks) {
    const size_t out = to_send > 0 ? moved(::send(socket_, sent, to_send, MSG_DONTWAIT | MSG_NOSIGNAL)) : 0;
    const size_t in = to_receive > 0 ? moved(::recv(socket_, received, to_receive, MSG_DONTWAIT)) : 0;
    sent += out, to_send -= out, received += in, to_receive -= in;
    if (out + in > 0) {
      looks = 0;
    } else if (looks < kLooks) {
      cpu_pause();
    } else if (looks < most) {
      sched_yield();
    } else {
      pollfd ready{socket_, static_cast<short>((to_send > 0 ? POLLOUT : 0) | (to_receive > 0 ? POLLIN : 0)), 0};
      poll(&ready, 1, -1);
    }
  }
}

void Peer::add(float* x, int64_t n) {
  float* other = scratch(Slot::received, n);
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  exchange(reinterpret_cast<const char*>(x), bytes, reinterpret_cast<char*>(other), bytes);
  for (int64_t i = 0; i < n; ++i) x[i] += other[i];
}

mx::array Peer::all_sum(const mx::array& x) {
  if (x.dtype() != mx::float32 && x.dtype() != mx::int32 && x.dtype() != mx::uint32) {
    throw std::invalid_argument("sums of ranks are of float32, int32 or uint32");
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<PeerNode>(cpu_stream(), shared_from_this(), Collective::sum), {x});
}

mx::array Peer::all_gather(const mx::array& x) {
  if (x.ndim() == 0) throw std::invalid_argument("arrays of ranks are joined along an axis");
  mx::Shape shape = x.shape();
  shape[0] *= 2;
  return mx::array(std::move(shape), x.dtype(), std::make_shared<PeerNode>(cpu_stream(), shared_from_this(), Collective::gather), {x});
}

mx::array Peer::gather_columns(const mx::array& x, int others) {
  if (x.ndim() == 0 || x.size() == 0 || others <= 0) throw std::invalid_argument("there are no columns to gather");
  if (rank_ != 0) return send(x);
  mx::Shape shape = x.shape();
  shape.back() += others;
  return mx::array(std::move(shape), x.dtype(), std::make_shared<PeerNode>(cpu_stream(), shared_from_this(), Collective::columns), {x});
}

mx::array Peer::send(const mx::array& x) {
  return mx::array(x.shape(), x.dtype(), std::make_shared<PeerNode>(cpu_stream(), shared_from_this(), Collective::send), {x});
}

mx::array Peer::receive(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream) {
  return mx::array(shape, dtype, std::make_shared<PeerNode>(stream, shared_from_this(), Collective::receive), {});
}

}  // namespace headrace
