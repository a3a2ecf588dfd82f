// A channel through shared memory: a ring buffer for each direction and a wake-up socket.
//
// Each ring has one writer and one reader. A rank sets a flag in the ring before it sleeps; the
// peer that then moves a position of the ring sends one byte on the socket. The kernel closes the
// socket when a rank dies. A goodbye message that does not fit into a full ring is also sent on the
// socket. local.cpp and shm.cpp differ only in how two ranks obtain the same rings.
#pragma once

#include <memory>
#include <vector>

#include "os/fd.h"
#include "os/shared_memory.h"
#include "os/wake_event.h"
#include "transport/ring_positions.h"
#include "transport/transport.h"

namespace pycomm::transport {

// Memory that a peer shares in addition to the rings.
struct PeerMemory {
  std::shared_ptr<std::byte> memory;
  os::HeapView heap;
};

class RingChannel final : public Channel {
 public:
  RingChannel(std::string_view transport, std::shared_ptr<os::RingMemory> in,
              std::shared_ptr<os::RingMemory> out, os::Fd wakeup_socket,
              PeerMemory peer_memory = {});

  std::string_view transport() const override { return transport_; }
  size_t send(ConstBytes head, ConstBytes body) override;
  bool has_space(size_t bytes) override { return !closed_ && writer_.has_space(bytes); }
  ConstBytes peek(size_t want) override;
  void take(size_t bytes) override;
  size_t receive(Bytes into) override;
  bool is_closed() const override { return closed_; }
  std::string_view protocol_error() const override {
    return corrupt_ ? "its ring in shared memory has an invalid write position" : "";
  }
  int swap_processors(int own) override;
  void wake_by(const os::WakeEvent& event) override;
  pollfd arm(Want want) override;
  void disarm(short revents) override;
  void close(ConstBytes unsent) override;
  void wake_peer() override;
  std::shared_ptr<std::byte> memory() const override { return peer_memory_.memory; }
  os::HeapView heap() const override { return peer_memory_.heap; }

 private:
  static RingHead<>& head_of(const os::RingMemory& ring) {
    return *reinterpret_cast<RingHead<>*>(ring.head());
  }
  size_t put(ConstBytes bytes);
  void send_goodbye(ConstBytes unsent);
  void drain_wakeup(ConstBytes bytes);
  void end_watch();
  void append_goodbye();

  std::string_view transport_;
  std::shared_ptr<os::RingMemory> in_, out_;
  os::Fd wakeup_socket_;
  const os::WakeEvent* wake_event_ = nullptr;  // watches the socket
  bool readable_ = false;                      // set by wake_event_: the socket was
  PeerMemory peer_memory_;
  RingWriter<> writer_;
  RingReader<> reader_;
  std::vector<std::byte> goodbye_;    // received on the wake-up socket
  std::vector<std::byte> remaining_;  // ring and goodbye, after the peer closed; replaces the ring
  size_t remaining_taken_ = 0;
  bool closed_ = false, corrupt_ = false;
};

}  // namespace pycomm::transport
