// The client of the TCP store: sends each call as a request, again on another connection if one is
// lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "core/deadline.h"
#include "rendezvous/server_connections.h"
#include "rendezvous/store_frame.h"
#include "rendezvous/tcp_store.h"

namespace pycomm::rendezvous {

class StoreClient final : public TcpStore {
 public:
  // See TcpStore::connect().
  StoreClient(const std::string& host, uint16_t port, const std::string& key,
              const Deadline& deadline, StoreHooks hooks);

  void set(const std::string& key, const std::string& value, const Deadline& deadline) override;
  std::string get(const std::string& key, const Deadline& deadline) override;
  int64_t add(const std::string& key, int64_t amount, const Deadline& deadline) override;
  std::optional<std::string> remove(const std::string& key, const Deadline& deadline) override;
  std::string claim(const std::string& key, const std::string& value,
                    const Deadline& deadline) override;
  void all_ranks_connected() override { pool_.stop_growing(); }

 private:
  // Numbers a request that changes a key, during its lifetime: the server recognizes a change that
  // it already applied.
  class InFlight {
   public:
    InFlight(StoreClient& client, store_frame::Request& request);
    ~InFlight();
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

   private:
    StoreClient& client_;
    uint64_t number_;
  };

  std::optional<store_frame::Reply> ask(const store_frame::Request& request,
                                        const Deadline& deadline,
                                        std::chrono::milliseconds slack = {});
  store_frame::Reply change(store_frame::Request request, const Deadline& deadline);

  ClientWait wait_;
  ServerDialer dialer_;
  ConnectionPool pool_;
  uint64_t client_;   // a random number that identifies this client
  std::mutex mutex_;  // guards the next two
  uint64_t next_ = 1;
  std::set<uint64_t> in_flight_;
};

}  // namespace pycomm::rendezvous
