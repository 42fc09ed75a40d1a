// What the structs that cross the C interface look like, as text: kernels/tools/native.py compares it with its own, since a library
// that was built before a struct changed would read arguments where they are not.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

namespace voltserve {

struct Field {
  const char *name;
  size_t offset;
};

// "Name size: field offset, field offset"; a line.
inline std::string describe(const char *name, size_t size, std::initializer_list<Field> fields) {
  std::string line = std::string(name) + " " + std::to_string(size) + ":";
  for (const Field &field : fields) line += std::string(" ") + field.name + " " + std::to_string(field.offset) + ",";
  line.back() = '\n';
  return line;
}

}  // namespace voltserve

#define AT(type, field) {#field, offsetof(voltserve::type, field)}
