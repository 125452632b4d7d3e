// Do dicts and lists of Python still hold the very objects they held? Asked before every capture.
#pragma once
#include <cstddef>
#include <vector>

struct _object;  // PyObject

namespace zs {

// Everything here needs the GIL, the destructor too. Keeps a reference to each container and each item, so
// that no address can come back as another object.
class Watch {
 public:
  // Throws Kind::usage for what is neither a dict nor a list.
  explicit Watch(const std::vector<_object*>& containers);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();

  bool same() const;

  // For Python's collector of cycles: every object held, until `visit` returns other than 0; and letting go
  // of all.
  int traverse(int (*visit)(_object*, void*), void* argument) const;
  void drop() noexcept;

 private:
  struct Container {
    _object* object;
    bool is_dict;
    size_t end;                   // of its items in items_
    const void* table = nullptr;  // where a dict keeps its items, or did; only ever asked for ahead of need
  };

  void hold(_object* item);
  [[gnu::always_inline]] static inline void fetch_ahead(const Container& container) noexcept;

  std::vector<Container> containers_;
  std::vector<_object*> items_;  // of a dict: key, value, key, value
};

}  // namespace zs
