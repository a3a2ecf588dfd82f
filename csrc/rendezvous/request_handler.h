// The keys that the server of the TCP store holds, and the effect of its clients' requests on them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "os/wake_event.h"
#include "rendezvous/local_store.h"
#include "rendezvous/store_frame.h"

namespace pycomm::rendezvous {

class RequestHandler {
 public:
  // `hello`: the reply to that request. `changed` is notified of each change: a client may wait for
  // it.
  RequestHandler(std::string hello, const os::WakeEvent& changed);

  LocalStore& keys() { return keys_; }  // thread-safe
  // Used by one thread. Nothing: a get whose key is not set.
  std::optional<store_frame::Reply> handle(const store_frame::Request& request);

 private:
  // To changes of one client: the replies that it may still need, by number.
  struct ClientReplies {
    uint64_t oldest = 0;
    std::map<uint64_t, store_frame::Reply> replies;
  };

  store_frame::Reply change_once(const store_frame::Request& request);
  store_frame::Reply change(const store_frame::Request& request);
  store_frame::Reply add(const store_frame::Request& request);

  std::string hello_;
  const os::WakeEvent& changed_;
  LocalStore keys_;
  std::map<uint64_t, ClientReplies> replies_;  // by client
};

}  // namespace pycomm::rendezvous
