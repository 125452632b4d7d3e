// Image to file and back from several threads, direct and plain, and what a damaged file shows.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "../crc32c.hpp"
#include "../segment.hpp"
#include "../transfer.hpp"
#include "check.hpp"

namespace {

std::vector<uint32_t> checksums_of(const std::byte* image, uint64_t nbytes, uint64_t chunk) {
  std::vector<uint32_t> result;
  for (uint64_t at = 0; at < nbytes; at += chunk)
    result.push_back(zs::crc32c(image + at, std::min(chunk, nbytes - at)));
  return result;
}

}  // namespace

int main() {
  zs::Pool pool("test", 4);
  std::mt19937_64 random(3);
  for (const bool direct : {false, true})
    for (const uint64_t nbytes : {uint64_t{1}, uint64_t{4096}, uint64_t{1'000'003}, uint64_t{20'000'001}}) {
      const uint64_t chunk = 9 << 20;
      char path[] = "native-test-XXXXXX";
      const int fd = ::mkstemp(path);
      CHECK(fd >= 0);
      ::unlink(path);
      zs::Segment segment("test", nbytes), other("test", nbytes);
      std::byte* const image = segment.mapping()->data();
      for (uint64_t at = 0; at < nbytes; ++at) image[at] = static_cast<std::byte>(random());
      const auto sums = checksums_of(image, nbytes, chunk);
      const auto write = zs::FileWrite::begin(pool, fd, image, nbytes, chunk, sums, direct);
      while (!write->done()) {  // held again and again it ends all the same
        write->hold();
        std::this_thread::yield();
        write->go_on();
      }
      write->rethrow();
      CHECK(static_cast<uint64_t>(::lseek(fd, 0, SEEK_END)) == nbytes);
      const auto read = zs::FileRead::begin(pool, fd, other.mapping()->data(), nbytes, chunk, sums, direct);
      while (!read->done()) CHECK(read->verified() <= sums.size());
      read->rethrow();
      CHECK(read->bad().empty() && read->verified() == sums.size());
      CHECK(std::memcmp(image, other.mapping()->data(), nbytes) == 0);

      CHECK(::pwrite(fd, "damage", 6, static_cast<off_t>(nbytes) - 1) == 6);
      image[nbytes - 1] = std::byte{'e'};
      const auto damaged =
          zs::FileRead::begin(pool, fd, other.mapping()->data(), nbytes, chunk, sums, direct);
      CHECK(damaged->wait_for(std::nullopt));
      const bool same = sums == checksums_of(other.mapping()->data(), nbytes, chunk);
      CHECK(damaged->bad() == (same ? std::vector<uint64_t>{} : std::vector<uint64_t>{sums.size() - 1}));
      ::close(fd);
    }
  return 0;
}
