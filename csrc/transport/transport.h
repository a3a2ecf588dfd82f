// The interface of a transport: moves bytes, in order and in both directions, between two ranks. It
// does not interpret them.
//
// Nothing here blocks. An idle rank arms its channels, polls their descriptors, and disarms them
// again. So one poll(2) covers any mixture of transports and detects the death of a peer.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/shared_heap.h"
#include "os/wake_event.h"

namespace pycomm::transport {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// The events that wake a sleeping rank on a channel. The peer's close always wakes it.
struct Want {
  bool receive = false;
  bool send = false;
  // With `receive`: the minimum bytes for a wake-up, if the channel supports it.
  size_t bytes = 1;
};

// One end of a connection. Used by one thread at a time.
class Channel {
 public:
  virtual ~Channel() = default;  // closes
  virtual std::string_view transport() const = 0;

  // Takes as much of `head` and then `body` as fits now, perhaps nothing; returns the bytes taken.
  // The next send() or close() must start with the bytes that were not taken. After the peer closed
  // the connection, bytes are taken and lost.
  virtual size_t send(ConstBytes head, ConstBytes body) = 0;
  // Whether the next send() surely takes so many bytes.
  virtual bool has_space(size_t /*bytes*/) { return false; }
  // A hint for the next sends: whether more follow immediately, so that the end of the data may be
  // held back for them (MSG_MORE).
  virtual void expect_more(bool) {}

  // The bytes that have arrived and were not taken, contiguous; at least 64 KiB if that many
  // arrived and `want` asks for them. Valid until the next call.
  virtual ConstBytes peek(size_t want) = 0;
  virtual void take(size_t bytes) = 0;
  // Moves some or all of the bytes that have arrived to `into`; returns their number, perhaps 0.
  virtual size_t receive(Bytes into) = 0;

  // The peer closed the connection or died. Bytes that it sent before can still be received.
  virtual bool is_closed() const = 0;
  // The reason if the channel is closed because the peer violated the protocol. Else empty.
  virtual std::string_view protocol_error() const { return {}; }

  // `event`, which outlives the channel, may watch it: then the descriptors of arm() are -1, and
  // its owner calls poll() of `event` before disarm().
  virtual void wake_by(const os::WakeEvent& /*event*/) {}
  // Call before sleeping. Check for progress once more between arm() and poll(2), and do not sleep
  // if there was any; otherwise a wake-up can be lost.
  virtual pollfd arm(Want want) = 0;
  virtual void disarm(short revents) = 0;

  // Whether polling costs about as much as it saves: then sleep while much data is in transit.
  virtual bool polling_is_expensive() const { return false; }

  // The round trip between the hosts, measured while connecting; 0 inside a host.
  virtual std::chrono::microseconds round_trip() const { return {}; }

  // Publishes the processor on which this rank runs to the peer, and returns the last one that the
  // peer published; -1: unknown.
  virtual int swap_processors(int /*own*/) { return -1; }

  // Wakes the peer if it sleeps on this channel.
  virtual void wake_peer() {}
  // The peer's shared memory segment for the ranks of its host; null on other transports.
  virtual std::shared_ptr<std::byte> memory() const { return nullptr; }
  // The peer's shared heap, if it passed one.
  virtual os::HeapView heap() const { return {}; }

  // Closes this side. The bytes sent before, then `unsent`, are still delivered even if the peer
  // does not read for a while; then the peer sees is_closed(). Nothing more is received. Does not
  // block.
  virtual void close(ConstBytes unsent) = 0;
};

// A transport between processes. Two ranks connect a socket, authenticate (handshake.h), and only
// then make a channel of it: each side calls send_memory(), then accept().
class SocketTransport {
 public:
  virtual ~SocketTransport() = default;
  virtual std::string_view name() const = 0;
  // The address for peers to connect to, or several separated by blanks; plain text.
  virtual const std::string& address() const = 0;
  virtual std::vector<int> listeners() const = 0;
  // The addresses in a listener's address() at which a caller on the same host, or on another one,
  // may reach it; best first, perhaps none.
  virtual std::vector<std::string> candidates(const std::string& address, bool same_host) const = 0;
  // Starts to connect to one of them. The descriptor becomes writable when the connection is
  // established or failed. Throws PeerLost if it cannot be started.
  virtual os::Fd start_connect(const std::string& address) const = 0;
  // Sends the shared memory that the other side needs. Never blocks for long.
  virtual void send_memory(int fd) = 0;
  // Whether accept() waits for the other side's memory; it has arrived when the descriptor is
  // readable.
  virtual bool exchanges() const = 0;
  // Waits for the other side's memory. Throws PeerLost, Timeout.
  virtual std::unique_ptr<Channel> accept(os::Fd fd, const Deadline& deadline) = 0;
  // This rank's shared memory segment: memory() of the channels of the peers that it accepted.
  virtual std::shared_ptr<std::byte> memory() const { return nullptr; }
};

}  // namespace pycomm::transport
