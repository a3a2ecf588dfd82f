// Shared by the suites of the stores: a key, an address, and each kind of store with two ends.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/deadline.h"
#include "descriptors.h"
#include "harness.h"
#include "os/socket.h"
#include "rendezvous/local_store.h"
#include "rendezvous/tcp_store.h"

namespace pycomm {

using namespace std::chrono_literals;

inline const std::string kHost = "127.0.0.1", kKey = "the key";

inline Deadline within(std::chrono::nanoseconds limit) { return Deadline(limit); }

inline uint16_t free_port() {
  return os::local_address(os::listen_on(os::tcp_address(kHost, 0), 1).get()).port();
}

// Runs the body over two ends of each kind of store.
inline void with_each_store(
    const std::function<void(rendezvous::Store& here, rendezvous::Store& there)>& body) {
  rendezvous::LocalStore local;
  body(local, local);
  const auto server = rendezvous::TcpStore::serve(kHost, 0, kKey);
  const auto client = rendezvous::TcpStore::connect(kHost, server->port(), kKey, within(10s));
  body(*server, *client);
  const auto other = rendezvous::TcpStore::serve(kHost, 0, kKey);
  const auto first = rendezvous::TcpStore::connect(kHost, other->port(), kKey, within(10s));
  const auto second = rendezvous::TcpStore::connect(kHost, other->port(), kKey, within(10s));
  body(*first, *second);
}

}  // namespace pycomm
