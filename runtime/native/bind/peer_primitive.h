// Collectives of two ranks over a connection of their own, run by the stream's thread.
//
// MLX's ring hands each message to three threads in turn and exchanges a sum in two rounds; on an idle machine that takes several times
// as long as the exchange itself. Here the thread that needs the sum sends, receives and adds, in one round.
// Contract: both ranks call the same collectives in the same order. A call may send on one stream and receive on another.
//
// Guard: tests/runtime/ranks/test_peer.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace headrace {

namespace mx = mlx::core;

// The connection to the other rank: a stream socket, closed with it.
class Peer : public std::enable_shared_from_this<Peer> {
 public:
  Peer(int socket, int rank) : socket_(socket), rank_(rank) {}
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  // x plus the other rank's, with the same bits on both. x: float32, int32 or uint32.
  mx::array all_sum(const mx::array& x);
  // Rank 0's x (n, ...) and rank 1's behind it: (2n, ...).
  mx::array all_gather(const mx::array& x);
  // On rank 0 x (..., n) and the other rank's (..., others) beside it; on the other x, which is sent.
  mx::array gather_columns(const mx::array& x, int others);
  // x, sent once it is evaluated.
  mx::array send(const mx::array& x);
  // An array of the other rank. Blocks `stream` until it has come.
  mx::array receive(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream);

  // x += the other rank's, with the same bits on both.
  void add(float* x, int64_t n);
  // Sends and receives at a time. Waits a while awake, then asleep. Throws std::runtime_error if the connection is lost.
  void exchange(const char* sent, size_t to_send, char* received, size_t to_receive);
  int rank() const { return rank_; }

 private:
  int socket_;
  int rank_;  // of this end: 0 or 1
};

}  // namespace headrace
