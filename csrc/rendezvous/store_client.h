// The client of the TCP store: sends each call as a request, again on another connection if one is
// lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "core/deadline.h"
#include "rendezvous/change_numbers.h"
#include "rendezvous/client_wait.h"
#include "rendezvous/connection_pool.h"
#include "rendezvous/server_dialer.h"
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
  std::optional<store_frame::Reply> ask(const store_frame::Request& request,
                                        const Deadline& deadline,
                                        std::chrono::milliseconds slack = {});
  store_frame::Reply change(store_frame::Request request, const Deadline& deadline);

  ClientWait wait_;
  ServerDialer dialer_;
  ConnectionPool pool_;
  ChangeNumbers numbers_;
};

}  // namespace pycomm::rendezvous
