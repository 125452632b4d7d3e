#include "forks.hpp"

#include <pthread.h>

namespace zs {
namespace {

uint32_t count = 0;  // written where there is one thread only

[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });

}  // namespace

uint32_t forks() noexcept {
  return count;
}

const uint32_t* forks_at() noexcept {
  return &count;
}

}  // namespace zs
