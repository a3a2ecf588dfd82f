// What a transport is: a way to move bytes, in order and in both directions, between two ranks. It
// knows no dtype, no reduction, no plan, and not what a frame means.
//
// Nothing here blocks. A rank that has nothing to do arms its channels, polls their descriptors,
// and disarms them again; so one poll(2) covers any mixture of transports, and sees a peer die.
#pragma once

#include <poll.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "os/fd.h"
#include "os/shared_heap.h"

namespace pycomm {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// What a rank waits for on a channel while it sleeps. A channel always wakes it when the peer
// closes.
struct Want {
  bool receive = false;
  bool send = false;
  // Of `receive`: how much is worth a wake-up, where the channel can tell; less may lie there until
  // something else wakes the rank.
  size_t bytes = 1;
};

// One end of a connection. Used by one thread at a time.
class Channel {
 public:
  virtual ~Channel() = default;  // closes
  virtual std::string_view transport() const = 0;

  // Takes as much of `head` and then `body` as fits now, perhaps nothing; gives the bytes taken.
  // The bytes that were not taken come first in the next send() or close(). After the peer closed
  // bytes are taken and lost.
  virtual size_t send(ConstBytes head, ConstBytes body) = 0;
  // Of the sends to come: whether further ones follow at once, so that the end of what is sent may
  // wait for them.
  virtual void expect_more(bool) {}

  // What has arrived and was not taken, as one run; at least 64 KiB of it if that much was sent and
  // `want` asks for it. Valid until the next call.
  virtual ConstBytes peek(size_t want) = 0;
  virtual void take(size_t bytes) = 0;
  // Moves what has arrived, or a part of it, into `into`; gives the bytes moved, 0 if none are
  // here.
  virtual size_t receive(Bytes into) = 0;

  // The peer closed the connection or died. What it sent before can still be received.
  virtual bool is_closed() const = 0;
  // Why the channel counts as closed, where the peer violated the protocol. Else empty.
  virtual std::string_view protocol_error() const { return {}; }

  // Before sleeping; look for progress once more between arm() and poll(2), and do not sleep if
  // there was any, or a wake-up is lost.
  virtual pollfd arm(Want want) = 0;
  virtual void disarm(short revents) = 0;

  // Whether polling costs about as much as it gains: while much data is in transit it is better to
  // sleep.
  virtual bool polling_is_expensive() const { return false; }

  // Wakes the peer if it sleeps on this channel.
  virtual void wake_peer() {}
  // What the peer lays out for the ranks of its host, where both see the same memory; else null.
  virtual std::shared_ptr<std::byte> memory() const { return nullptr; }
  // The peer's heap, where it gave one.
  virtual HeapView heap() const { return {}; }

  // Ends this side: what was sent is still delivered, and behind it `unsent`, which had no room
  // yet, though the peer may not read for long; then it sees is_closed(). Nothing more is received.
  // Does not block.
  virtual void close(ConstBytes unsent) = 0;
};

// Ranks of two processes meet on a socket, prove who they are (handshake.h), and only then make a
// channel of it: each side offers, then each side accepts.
class SocketTransport {
 public:
  virtual ~SocketTransport() = default;
  virtual std::string_view name() const = 0;
  // What peers need in order to call: one address, or several with blanks between them; plain text.
  virtual const std::string& address() const = 0;
  virtual std::vector<int> listeners() const = 0;
  // Of what a listener gave as address(), those that a caller on the same host, or on another, may
  // reach it by, best first; perhaps none.
  virtual std::vector<std::string> ways(const std::string& address, bool same_host) const = 0;
  // Starts a connection by one of them. It fails or stands when the descriptor is writable. Throws
  // PeerLost where it cannot even be begun.
  virtual Fd call(const std::string& way) const = 0;
  // Sends what the other side needs for its end. Never blocks for long.
  virtual void send_memory(int fd) = 0;
  // Whether accept() waits for an offer, which is there when the descriptor is readable.
  virtual bool exchanges() const = 0;
  // Waits for the other side's offer. Throws PeerLost, Timeout.
  virtual std::unique_ptr<Channel> accept(Fd fd, const Deadline& deadline) = 0;
  // What this rank lays out for those that it has accepted: their channels' memory().
  virtual std::shared_ptr<std::byte> memory() const { return nullptr; }
};

}  // namespace pycomm
