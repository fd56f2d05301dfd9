module ipvs.test/consumers

go 1.24
